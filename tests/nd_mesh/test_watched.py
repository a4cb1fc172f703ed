"""A run that is watched: the journal by default, the ledger and checked mode on request, and the same numbers."""

from dataclasses import replace
from unittest import mock

import torch

from collectives import comm, journal, verdict
from nd_mesh import metrics
from nd_mesh.config import WatchConfig
from tests.nd_mesh.test_loop import report_a_run
from tests.nd_mesh.test_train import config
from tests.pool import RankFailed


def what_a_run_says(run, cfg):
    with mock.patch.object(metrics.Report, "say") as say:
        report_a_run(run, cfg)
    return "\n".join(call.args[0] for call in say.call_args_list)


def test_a_watched_run_is_the_same_run(pool, tmp_path):
    plain = replace(config(2, out=str(tmp_path / "plain")), watch=WatchConfig(journal=False))
    seen = replace(config(2, out=str(tmp_path / "seen")), watch=WatchConfig(checked=True, ledger=True))
    _, said = (pool.run(2, what_a_run_says, cfg)[0] for cfg in (plain, seen))
    losses = [[r["loss"] for r in metrics.read(tmp_path / run) if "loss" in r] for run in ("plain", "seen")]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "journal").exists()
    journals = journal.read(tmp_path / "seen" / "journal")
    assert list(journals) == [0, 1]
    assert verdict.verdict(journals, 0.0) == ["nothing is in flight, and every group's ranks have made the same calls"]
    [row] = [line.split() for line in said.splitlines() if line.startswith("all_reduce ")]
    assert row[1] == "0,1"
    assert int(row[3].replace(",", "")) == int(row[4].replace(",", "")) > 0


def one_rank_alone(run, cfg):
    """Rank 1 sums what nobody else does, in the middle of the run."""
    real = metrics.Report.step

    def step(self, record):
        if run.rank == 1 and record.step == 2:
            comm.all_reduce(torch.ones(3), group=run.world)
        real(self, record)

    metrics.Report.step = step
    report_a_run(run, cfg)


def test_checked_mode_finds_a_call_that_one_rank_makes_alone(pool, tmp_path):
    cfg = replace(config(2, out=str(tmp_path / "run")), watch=WatchConfig(checked=True))
    try:
        pool.run(2, one_rank_alone, cfg)
    except RankFailed as failure:
        assert "the ranks make different calls: rank 0 all_reduce" in str(failure)
        assert "; rank 1 all_reduce [3] float32" in str(failure)
    else:
        raise AssertionError("nothing was found")
