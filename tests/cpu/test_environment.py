# SPDX-License-Identifier: Apache-2.0
"""What keeps two streams from running beside each other is found and said, with the way out."""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_pdmux.spatial import environment

UUID = "0ba3ee2f-1111-2222-3333-444455556666"


@pytest.mark.parametrize("value", ["1", "7", "0", "many", ""])
def test_few_hardware_queues_are_a_problem(value):
    problem = environment.connection_problem({"CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert problem.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS={value}: ") and "unset it or set it to 8 or more" in problem


@pytest.mark.parametrize("environ", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}])
def test_the_drivers_default_and_more_are_none(environ):
    assert environment.connection_problem(environ) is None


@pytest.fixture
def driver(monkeypatch):
    """cuda.bindings.driver with an answer to whether MPS is on."""
    made = ModuleType("cuda.bindings.driver")
    made.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    made.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED=133)
    made.answer = (0, 0)
    made.cuDeviceGetAttribute = lambda attribute, device: made.answer
    package = ModuleType("cuda.bindings")
    package.driver = made
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": made}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(("answer", "found"), [((0, 1), True), ((0, 0), False), ((801, 1), False)])
def test_mps_is_a_problem_when_the_driver_says_that_it_is_on(driver, answer, found):
    driver.answer = answer
    problem = environment.mps_problem(0)
    assert (problem is not None) == found
    assert not found or "stop the MPS daemon" in problem


def test_an_older_driver_that_does_not_know_mps_is_none(driver):
    driver.CUdevice_attribute = SimpleNamespace()
    assert environment.mps_problem(0) is None


def test_without_cuda_bindings_nothing_is_said_of_mps(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert environment.mps_problem(0) is None


def say(monkeypatch, text, code=0):
    run = subprocess.CompletedProcess((), code, stdout=text, stderr="")
    monkeypatch.setattr(environment.subprocess, "run", lambda *args, **kwargs: run)


def test_other_processes_on_this_gpu_are_found_and_this_one_is_not(monkeypatch):
    lines = [f"GPU-{UUID}, {os.getpid()}, 100", f"GPU-{UUID}, 1, 2000", "GPU-another, 2, 3000", "not,a line", ""]
    say(monkeypatch, "\n".join(lines))
    assert environment.other_processes(UUID) == ["pid 1, 2000 MiB"]


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_without_nvidia_smi_nothing_is_said_of_processes(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(environment.subprocess, "run", fail)
    assert environment.other_processes(UUID) == []


def test_nvidia_smi_that_fails_says_nothing(monkeypatch):
    say(monkeypatch, f"GPU-{UUID}, 1, 2000", code=9)
    assert environment.other_processes(UUID) == []


def test_all_problems_are_said_and_none_when_there_is_none(monkeypatch, driver):
    driver.answer = (0, 1)
    say(monkeypatch, f"GPU-{UUID}, 1, 2000")
    found = environment.problems({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 0, UUID)
    assert len(found) == 3 and "pid 1, 2000 MiB" in found[2]
    driver.answer = (0, 0)
    say(monkeypatch, "")
    assert environment.problems({}, 0, UUID) == []
