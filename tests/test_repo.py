"""The rules of repo_rules.py hold for the tree, and each of them sees what it is there to see."""

import re
from pathlib import Path

import pytest

from tests import repo_rules as rules


@pytest.fixture(scope="module")
def tree():
    return rules.read_tree(Path(__file__).parent.parent)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule, tree):
    violations = rule(tree)
    assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


# Small files, each under a line `@ rule path`. A line that breaks the rule ends in `# BAD`, the others only look
# like it. (A ^ keeps the last ones out of sight of their own rule.)
PLANTED = """
@ import_floors ddp/a.py
import json, ddp.b
from . import b
from collectives import comm
def f():
    import zero.flat  # BAD
from nd_mesh.model import GPT  # BAD
from ddp import bench  # BAD
from .bench import run  # BAD
from tests import pool  # BAD
importlib.import_module('zero')  # BAD
@ import_floors collectives/algorithms/a.py
from ..p2p import send
import ddp  # BAD
@ import_floors ddp/bench.py
from nd_mesh.model import GPT
import zero  # BAD
@ import_floors nd_mesh/a.py
import ddp, zero.flat, collectives.comm
import zero.bench  # BAD
@ import_floors tests/ddp/a.py
import zero, ddp.bench, tests.pool
@ import_floors extra/__init__.py
# BAD: a folder without a floor

@ no_ready_made_parallelism zero/a.py
import checkpoint, torch.optim
import torch.nn as nn, torch.distributed as dist
from torch.utils import data, checkpoint as c  # BAD
from torch.utils.data import Dataset, DistributedSampler  # BAD
from torch.distributed import ReduceOp, device_mesh  # BAD
nn.Module
nn.parallel.DistributedDataParallel  # BAD
dist.device_mesh.DeviceMesh  # BAD
data.distributed.DistributedSampler  # BAD
def f():
    from torch.distributed.fsdp import fully_shard  # BAD
@ no_ready_made_parallelism zero/bench.py
from torch.nn.parallel import DistributedDataParallel

@ operations_in_two_files zero/a.py
import torch.distributed as dist
from torch import distributed as d
from collectives import comm, runtime
from torch.distributed import ReduceOp, all_reduce as r  # BAD
from torch.distributed import *  # BAD
def step(x: dist.Work, group: dist.ProcessGroup):
    comm.all_reduce(x, group=group), comm.send(x, group), getattr(comm, x), runtime.new_group([0])
    x.scatter(0, x, x), torch.gather(x, 0, x), functools.reduce(max, x), group.size()
    dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group), dist.ReduceOp.SUM
    dist.all_reduce(x)  # BAD
    torch.distributed.all_reduce_coalesced(x)  # BAD
    d.all_gather_into_tensor(x, x)  # BAD
    later = dist.reduce_scatter_single  # BAD
    dist.distributed_c10d._all_gather_base(x)  # BAD
    dist.broadcast_object_list(x)  # BAD
    dist.batch_isend_irecv([])  # BAD
    dist.P2POp(None, x)  # BAD
    dist.monitored_barrier()  # BAD
    own = dist
    own.irecv(x)  # BAD
    getattr(dist, x)(x)  # BAD
    group.allreduce([x]).wait()  # BAD
    self.dp_group.barrier()  # BAD
    dist.new_group([0])  # BAD
    dist.init_process_group()  # BAD
@ operations_in_two_files zero/bench.py
torch.distributed.all_reduce(x)
@ operations_in_two_files collectives/p2p.py
torch.distributed.isend(x)
@ operations_in_two_files collectives/comm.py
torch.distributed.all_reduce(x)
torch.distributed.new_group()  # BAD
@ operations_in_two_files collectives/runtime.py
import torch.distributed as dist
dist.new_group(), dist.init_process_group(), dist.destroy_process_group()
dist.all_reduce(x)  # BAD
dist.barrier()
dist.barrier()  # BAD

@ third_party fsdp/a.py
import torch, einops, numpy as np, math, collectives
import pandas  # BAD
import safetensors.torch  # BAD
import pydantic  # BAD
import rich  # BAD
from torch.utils import tensorboard  # BAD
def f():
    import matplotlib.pyplot
@ third_party checkpoint/shard.py
import xxhash
import safetensors  # BAD
@ third_party nd_mesh/train.py
import rich
import xxhash  # BAD
import pydantic  # BAD
import matplotlib  # BAD
@ third_party nd_mesh/config.py
import pydantic
@ third_party collectives/demo.py
from rich.table import Table
@ third_party collectives/bench.py
import deepspeed  # BAD

@ environment fsdp/a.py
import os, os as o
from os import environ as e, path  # BAD
os.environ['A']  # BAD
o.getenv('A')  # BAD
environ, os.path
@ environment collectives/runtime.py
os.environ

@ no_state_at_import fsdp/a.py
'a note'
KINDS = ('a', 'b')
T = TypeVar('T')
low, high = [], 1  # BAD
__all__ = ['f']
pairs = tuple([1])
Plan = dict[str, int]
LIST = []
seen = {}  # BAD
sizes = [n for n in KINDS]  # BAD
step = 0
def f():
    global step  # BAD
    own = []
    own.append(LIST[0])
    LIST.append(1)  # BAD
    LIST[0] = 1  # BAD
if True:
    pool: Pool = Pool()  # BAD
try:
    import x
except ImportError:
    print(1)  # BAD
torch.set_num_threads(1)  # BAD
for n in KINDS:  # BAD
    pass
if __name__ == '__main__':
    seen = []
    main()

@ telling_names tests/helpers.py
# BAD
@ telling_names zero/utils/a.py
# BAD
@ telling_names zero/core_loop.py
x = 1

@ one_idea zero/a.py
x = '# IDEA: not a comment'  # BAD: no idea
@ one_idea zero/b.py
x = 1  # IDEA: the one
# IDEA: another # BAD
@ one_idea collectives/algorithms/a.py
x = 1  # BAD
@ one_idea collectives/layout.py
# IDEA: may have one
# IDEA: another # BAD
@ one_idea nd_mesh/train.py
x = 1
@ one_idea zero/__main__.py
# IDEA: not here # BAD
@ one_idea tests/a.py
# IDEA: not here # BAD

@ docstrings zero/__init__.py
@ docstrings ddp/__init__.py
import x  # BAD
@ docstrings tests/a.py
'''Told.'''
def f(): pass
@ docstrings zero/a.py
'''Told.'''
def f(): pass  # BAD
def g(): 'Told.'
def _h(): pass
def main(): pass
@typing.overload
def k(): ...
class A:  # BAD
    def f(self): pass  # BAD
    @f.setter
    def f(self, value): pass
    def forward(self): pass
    def __len__(self): pass
class _B:
    def f(self): pass

@ no_machine README.md
a/work/b, ~/work/x, $HOME/work/x, https://a.org/root/b, /home, /tmp/x, pypi
cd /^work/here # BAD
/^home/ada/x # BAD
(see /^root/.cache) # BAD
pip -i https://py^pi.org/simple # BAD
download^.pytorch.org # BAD
@ no_machine LICENSE
/^work/here
"""
FILES = [
    (getattr(rules, rule), path, text.replace("^", ""))
    for rule, path, text in re.findall(r"^@ (\w+) (\S+)\n((?:(?!@ ).*\n)*)", PLANTED, re.MULTILINE)
]


@pytest.mark.parametrize(("rule", "path", "text"), FILES, ids=[f"{rule.__name__}:{path}" for rule, path, _ in FILES])
def test_rule_sees_the_bad_lines_and_no_others(rule, path, text):
    bad = [number for number, line in enumerate(text.splitlines(), start=1) if "# BAD" in line]
    found = rule({path: text})
    assert sorted({int(violation.split(":")[1]) for violation in found}) == bad, "\n".join(found)


PROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
dependencies = ["torch>=2.11", "Pydantic_Core"]
optional-dependencies = { dev = ["ruff"] }
[tool.setuptools]
packages = ["ddp", "ddp.inner"]
"""
PINS = "setuptools==84.2.1\ntorch==2.13.0\npydantic-core==2.50.5  # note\nruff==0.17.6\n"
WHOLE = ["ddp/README.md", "ddp/__init__.py", "ddp/__main__.py", "docs/a.md", "tests/a.py"]
FOLDERS = ["ddp/__init__.py", "ddp/inner/__init__.py", "tests/__init__.py", "docs/a.md"]
TREES = [
    (rules.whole_folders, dict.fromkeys(WHOLE, ""), []),
    (rules.whole_folders, dict.fromkeys(WHOLE[1:], ""), ["ddp/README.md:1: missing"]),
    (rules.listed_packages, dict.fromkeys(FOLDERS, ""), []),
    (rules.listed_packages, dict.fromkeys(FOLDERS[1:], ""), ["pyproject.toml:8: ddp has no __init__.py"]),
    (rules.listed_packages, dict.fromkeys([*FOLDERS, "a/__init__.py"], ""), ["pyproject.toml:8: a is not listed"]),
    (rules.pinned_requirements, {"constraints.txt": PINS}, []),
    (
        rules.pinned_requirements,
        {"constraints.txt": PINS.replace("ruff==", "ruff>=").replace("torch", "other")},
        [
            "constraints.txt:4: ruff>=0.17.6: pin it with ==",
            "pyproject.toml:5: torch>=2.11: constraints.txt does not pin it",
        ],
    ),
]


@pytest.mark.parametrize(("rule", "sources", "violations"), TREES)
def test_rule_over_several_files(rule, sources, violations):
    assert rule({"pyproject.toml": PROJECT, **sources}) == violations


def test_every_rule_has_a_violation_planted():
    caught = {rule for rule, _, text in FILES if "# BAD" in text} | {rule for rule, _, found in TREES if found}
    assert caught == set(rules.RULES)
