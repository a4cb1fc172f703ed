"""What every collective costs by every algorithm, on a machine of one's choice: cost.py as a table.

python -m collectives cost                                  a gigabyte on 16 H100 in nodes of 8
python -m collectives cost --ranks 128 --bytes 1e4          ten kilobytes on 128 of them
python -m collectives cost --between "100 Gb Ethernet"      over slower links
"""

import argparse
from collections.abc import Sequence

from collectives import cost
from collectives.cost import ALGORITHMS, LINKS, Topology


def table(n: float, ranks: int, machine: Topology) -> str:
    """Every algorithm for n bytes on this machine: formula and value of steps and of bytes sent, and the time.

    A barrier's token is 1 byte; the ring's broadcast and reduce go in 8 chunks.
    """
    lines = [f"{'':29}{'steps':>28}   {'bytes sent by the busiest rank':>35}{'ms':>11}"]
    before = None
    for (collective, algorithm), formula in ALGORITHMS.items():
        if algorithm == "hierarchical" and ranks % min(ranks, machine.per_node):
            continue  # nodes must be full
        found = cost.of(collective, algorithm, 1 if collective == "barrier" else n, ranks, machine)
        name = collective if collective != before else ""
        before = collective
        lines.append(
            f"{name:16}{algorithm:13}{formula.steps:>20}{found.steps:8,}"
            f"   {formula.sent:>16}{found.sent:19,.0f}{1e3 * found.seconds:11.3f}"
        )
    return "\n".join([*lines, *remarks(ranks)])


def remarks(ranks: int) -> list[str]:
    """Lines below a table, if the formulas of ALGORITHMS do not give the numbers beside them."""
    if ranks == 1:
        return ["one rank takes no step and sends nothing, whatever the formula says"]
    if ranks & (ranks - 1):
        return [
            "P is no power of two: doubling and halving take ⌊log₂P⌋ for log₂P, and two steps more of up to n bytes;",
            "a tree gathers with n/2 at most",
        ]
    return []


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collectives cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=16, help="GPUs in all (default %(default)s)")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs in a node (default %(default)s)")
    parser.add_argument("--bytes", type=float, default=1e9, help="of the whole message (default %(default)g)")
    parser.add_argument("--inside", choices=LINKS, default="NVLink 4 (H100)", help="the links in a node")
    parser.add_argument("--between", choices=LINKS, default="InfiniBand NDR", help="the links between nodes")
    options = parser.parse_args(arguments)
    try:
        machine = Topology(LINKS[options.inside], LINKS[options.between], options.per_node)
        print(table(options.bytes, options.ranks, machine))
    except ValueError as refusal:
        parser.error(str(refusal))
    return 0
