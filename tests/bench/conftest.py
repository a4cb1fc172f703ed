"""What every file of benches adds to pytest-benchmark's JSON."""

import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["torch"] = torch.__version__
