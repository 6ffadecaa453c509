# SPDX-License-Identifier: Apache-2.0
"""Tests that need an NVIDIA GPU: `python -m pytest tests/gpu`. They are not part of CI; results are committed.

PDMUX_RESULTS=FILE writes what was measured, every test with its outcome, the machine, the versions and the command.
"""

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[0] / "cpu"))  # the tiny model and the driver
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))  # the shapes, and the description of the machine

_outcomes: dict[str, str] = {}
_measured: dict[str, object] = {}


@pytest.fixture(scope="session", autouse=True)
def gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False")
    return torch.cuda.get_device_properties(0)


@pytest.fixture(scope="session")
def server_environ():
    """For a server, which does not inherit this process's environment as far as vLLM's goes."""
    return {name: os.environ[name] for name in ("VLLM_USE_FLASHINFER_SAMPLER",) if name in os.environ}


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
    _measured.update(report.user_properties)


def pytest_sessionfinish(session):
    if path := os.environ.get("PDMUX_RESULTS"):
        from machine import description

        command = "python -m pytest " + " ".join(session.config.invocation_params.args)
        result = {**description(), "command": command, "tests": _outcomes, "measured": _measured}
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
