# SPDX-License-Identifier: Apache-2.0
"""Faults put into the engine while a prompt is in the lane: its requests end with an error or nothing is seen of it,
and the others are unharmed. What hangs is `test_watchdog`'s, what happens to files `test_trace_file`'s."""

import time

import pytest
import tiny_model
import torch
from driver import Arrival, prompt
from test_lifecycle import chats, late, without
from tokens import assert_same
from vllm import SamplingParams

LAST = tiny_model.LAYERS - 1
FAULTS = (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), StopIteration(), AssertionError("x" * 10_000))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Failing:
    """Makes the lane raise where a layer of a batch begins: of the batches whose numbers, from 0, are in `batches`."""

    def __init__(self, driver, layer, error, batches=(0,)):
        self.lane = driver.worker._prefill_lane
        self.original = self.lane._view._at_layer
        self.layer, self.error, self.batches = layer, error, batches
        self.seen, self.raised = [], 0

    def __enter__(self):
        self.lane._view._at_layer = self.at_layer
        return self

    def __exit__(self, *args):
        self.lane._view._at_layer = self.original

    def at_layer(self):
        number = self.lane._current.id
        if number not in self.seen:
            self.seen.append(number)
        if self.lane._lane.layer == self.layer and self.seen.index(number) in self.batches:
            self.raised += 1
            raise self.error
        self.original()


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("layer", [0, LAST])
def test_whatever_a_layer_raises_ends_its_requests_alone(stock, pdmux, layer, error):
    pdmux.set_layers_per_group(1)
    arrivals = [*chats(), late()]
    with Failing(pdmux, layer, error) as failing:
        got = pdmux.run(arrivals)
    assert failing.raised == 1 and got["long"].finish_reasons == ["error"]
    assert_same(without(got, "long"), without(stock.run(arrivals), "long"))


def test_a_fault_while_the_first_token_is_sampled(stock, pdmux, monkeypatch):
    runner = pdmux.worker._prefill_lane._runner
    original, raised = runner.sample_tokens, []

    def sample_tokens(grammar):
        if not raised:
            raised.append(1)
            raise RuntimeError("injected")
        return original(grammar)

    monkeypatch.setattr(runner, "sample_tokens", sample_tokens)
    arrivals = [*chats(), late()]
    got = pdmux.run(arrivals)
    assert raised and got["long"].finish_reasons == ["error"]
    assert_same(without(got, "long"), without(stock.run(arrivals), "long"))


def test_fault_after_fault_leaves_nothing_behind_and_what_comes_later_is_served(stock, pdmux):
    """Every second of twenty prompts fails, each in another layer's turn."""
    pdmux.set_layers_per_group(2)
    chat = Arrival("chat", prompt(20, 1), SamplingParams(temperature=0, max_tokens=160, ignore_eos=True))
    arrivals = [chat, *(Arrival(f"p{i}", prompt(60 + i, 50 + i), GREEDY, 4 + 7 * i) for i in range(20))]
    with Failing(pdmux, 3, RuntimeError("injected"), range(0, 40, 2)) as failing:
        got = pdmux.run(arrivals)
    failed = [name for name, result in got.items() if result.finish_reasons == ["error"]]
    assert failing.raised >= 5 and len(failed) >= failing.raised and "chat" not in failed
    assert_same(without(got, *failed), without(stock.run(arrivals), *failed))


@pytest.fixture(scope="module")
def slo_engine(start_engine, tiny_model_path):
    return start_engine(tiny_model_path, pdmux={"itl_slo_ms": 500, "ttft_slo_ms": 5000})


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_clocks_that_jump(stock, slo_engine, monkeypatch, jump_s):
    """Every clock that Python has, twice, while a policy that learns from times decides."""
    driver = slo_engine
    driver.settle()
    assert driver.scheduler.reset_prefix_cache()
    jumped_s = 0.0
    for name in ("time", "monotonic", "perf_counter"):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda clock=clock: clock() + jumped_s)

    def jump(driver):
        nonlocal jumped_s
        if driver.step_number in (8, 25):
            jumped_s += jump_s

    arrivals = [*chats(), late(), late("later", 150, 22, 7)]
    got = driver.run(arrivals, jump)
    assert jumped_s == 2 * jump_s
    assert_same(got, stock.run(arrivals))
    driver.assert_nothing_left()
