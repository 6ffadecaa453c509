# SPDX-License-Identifier: Apache-2.0
"""Engines shared by the tests of this folder: starting one takes seconds, a test on it a fraction of one."""

from __future__ import annotations

import os

# Before vLLM is imported: engines in this process, a small KV cache, no look at a model hub.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tiny model gains nothing from a second core, and two teams of spinning workers lose much on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    import tiny_model

    return str(tiny_model.build(tmp_path_factory.mktemp("tiny") / "tiny-llama"))


@pytest.fixture(scope="session")
def start_engine():
    """Start an engine: `start_engine(model, pdmux={...} or None for stock, **engine arguments)` -> Driver."""
    from driver import ENGINE, Driver
    from vllm import LLM

    engines = []  # kept: when one is collected, vLLM tears down the process groups that all of them share

    def start(model, pdmux=None, **arguments):
        if pdmux is not None:
            # Whatever this machine's user has calibrated.
            arguments["additional_config"] = {"pdmux": {"trace_steps": 4096, "calibration": "off", **pdmux}}
        engines.append(Driver(LLM(model=model, **{**ENGINE, **arguments})))
        return engines[-1]

    return start


@pytest.fixture(scope="session")
def stock_engine(start_engine, tiny_model_path):
    return start_engine(tiny_model_path)


@pytest.fixture(scope="session")
def pdmux_engine(start_engine, tiny_model_path):
    return start_engine(tiny_model_path, pdmux={})


@pytest.fixture(scope="module")
def lab(tiny_model_path):
    """Schedules of the real scheduler, worker and lane on a virtual GPU (model_check.py)."""
    from async_engine import Engine
    from model_check import Lab
    from virtual_gpu import TimedExecutor

    return Lab(Engine(tiny_model_path, {}, executor=TimedExecutor))


@pytest.fixture(scope="session")
def server_pair(tmp_path_factory):
    """Two servers of a real model, with the plugin and without."""
    from server_pair import serving_pair

    with serving_pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def logs_of_a_failure(server_pair):
    """pytest prints what was printed before a failure: the servers' last lines."""
    yield
    for server in (server_pair.stock, server_pair.pdmux):
        print(server.log.name, server.log.read_text()[-6000:])


@pytest.fixture
def stock(stock_engine):
    return stock_engine.fresh()


@pytest.fixture
def pdmux(pdmux_engine):
    yield pdmux_engine.fresh()
    pdmux_engine.assert_nothing_left()


@pytest.fixture
def caplog_vllm(caplog):
    """caplog for vLLM's loggers, which do not propagate."""
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def assert_same_as_stock(stock, pdmux):
    """Serve the same arrivals with both engines and compare all that they say; returns pdmux's results."""
    from tokens import assert_same

    def check(arrivals, between_steps=None):
        expected, got = stock.run(arrivals), pdmux.run(arrivals, between_steps)
        assert_same(got, expected)
        return got

    return check
