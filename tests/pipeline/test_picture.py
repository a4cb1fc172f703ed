"""Pictures: a plan's spans are those of the simulator, as text and as PNG, and a run's are those of its lane."""

import pytest

from collectives.timeline import Span, draw, text
from pipeline import SCHEDULES, Times, schedule, simulate
from pipeline.picture import bubble, measured, planned, step_time
from pipeline.plan import B, F, I, W, made
from pipeline.simulate import alike

HALVES = made(
    "halves", (0, 1), 2, [[F(0, 0), F(0, 1), I(0, 0), W(0, 0), B(0, 1)], [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]]
)


def test_chart_of_a_plan():
    chart = text(planned(simulate(HALVES, alike(2, forward=2, input=2, weight=2))), width=88)
    assert chart == "\n".join(
        [
            "rank  0 |---f0---|---f1---|                |---i0---|---w0---|       |--backward 0.1---|",
            "rank  1          |---f0---|--backward 1.0--|---f1---|--backward 1.1--|",
            "ms      0                     5                     10                    15",
        ]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_time_and_bubble_are_those_of_the_simulator(name):
    plan = schedule(name, 4, 8)
    step = simulate(plan, Times(*[[1 + stage % 3 for stage in range(plan.stages)]] * 3, transfer=0.5))
    spans = planned(step, unit=0.05)
    assert step_time(spans) == pytest.approx(0.05 * step.step_time)
    assert bubble(spans) == pytest.approx(step.bubble)
    assert len(spans) == sum(map(len, plan.actions))


def test_spans_of_a_run():
    own = [[Span("compute", "forward 0.0", 1, 2), Span("waits", "", 2, 5)], [Span("compute", "forward 1.0", 2, 4)]]
    spans = measured(own)
    assert spans == [Span("rank  0", "forward 0.0", 0, 1), Span("rank  1", "forward 1.0", 1, 3)]
    assert (step_time(spans), bubble(spans)) == (3, 0.5)


def test_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    spans = planned(simulate(HALVES, alike(2)))
    draw(tmp_path / "plan.png", spans, spans, names=["plan", "run"])
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
