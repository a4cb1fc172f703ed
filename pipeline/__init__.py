"""Pipeline parallelism: the model is cut into stages, and microbatches follow each other through them."""

from pipeline.check import check
from pipeline.executor import Pipeline
from pipeline.links import connect
from pipeline.plan import Action, Plan
from pipeline.run import Microbatch
from pipeline.schedules import SCHEDULES, schedule
from pipeline.simulate import Simulated, Times, alike, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Microbatch",
    "Pipeline",
    "Plan",
    "Simulated",
    "Times",
    "alike",
    "check",
    "connect",
    "schedule",
    "simulate",
]
