# SPDX-License-Identifier: Apache-2.0
"""N-gram speculation: decode proposes and checks drafts beside a prompt in the lane; greedy tokens are stock's.

Run by test_ngram.py in a process of their own.
"""

import pytest
from beside_stock import prepared, same_tokens
from driver import Arrival, prompt
from test_equality import lane_steps
from test_lifecycle import Once, load_the_weights_again, pause_and_resume, reset
from tokens import assert_same
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# An answer that repeats itself, so that drafts are right.
REPEATING = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[65, 66, 67])


@pytest.fixture(scope="module")
def engines(start_engine, tiny_model_path):
    # Drafts change no greedy token, so stock needs none. The engine with drafts must be the last one to start.
    return [start_engine(tiny_model_path), start_engine(tiny_model_path, pdmux={}, speculative_config=SPECULATION)]


@pytest.fixture
def fresh(engines):
    yield from prepared(engines)


def chats(params=REPEATING):
    return [Arrival(f"chat{i}", prompt(20 + 7 * i, i), params) for i in range(3)]


class Accepted:
    """A hook that counts drafts that were scheduled beside layers of a prompt, and tokens beyond one in a step."""

    def __init__(self):
        self.before, self.most, self.beside = {}, 0, 0

    def __call__(self, driver):
        for req_id, request in driver.scheduler.requests.items():
            new = request.num_output_tokens - self.before.get(req_id, request.num_output_tokens)
            self.before[req_id] = request.num_output_tokens
            self.most = max(self.most, new)
            self.beside += new > 1 and bool(driver.scheduler._batches)


@pytest.mark.parametrize("layers, chunk", [(1, 50), (3, 256), (1000, 256)])
@pytest.mark.parametrize("params", [GREEDY, REPEATING], ids=["greedy", "repeating"])
def test_drafts_beside_a_prompt_in_the_lane(fresh, layers, chunk, params):
    pdmux = fresh[-1]
    pdmux.set_layers_per_group(layers)
    for driver in fresh:
        driver.set_chunk(chunk)
    arrivals = [
        *chats(params),
        Arrival("long", prompt(200, 100), params, 3),
        Arrival("repeats", prompt(30, 5) * 4, params, 5),
        Arrival("late", prompt(60, 6), params, 9),
    ]
    accepted = Accepted()
    same_tokens(fresh, arrivals, accepted)
    assert lane_steps(pdmux)
    if params is REPEATING:
        assert accepted.most > 1, "no draft was accepted"
        assert accepted.beside or layers == 1000


def test_a_grammar(fresh):
    """Drafts that it forbids are not taken."""
    choice = StructuredOutputsParams(choice=["abababababababab", "cdcdcdcdcdcdcdcd"])
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=choice)
    same_tokens(fresh, [*chats(), Arrival("long", prompt(150, 100), params, 3)])


def test_an_abort_in_the_lane(fresh):
    hook = Once(lambda driver: driver.abort("long"))
    arrivals = [
        *chats(),
        Arrival("long", prompt(200, 100), REPEATING, 3),
        Arrival("next", prompt(90, 7), REPEATING, 12),
    ]
    same_tokens(fresh, arrivals, hook, gone=["long"])
    assert hook.done


@pytest.mark.parametrize("action", [reset, pause_and_resume, load_the_weights_again])
def test_in_mid_prefill(fresh, action):
    hook = Once(action)
    same_tokens(fresh, [*chats(), Arrival("long", prompt(200, 100), REPEATING, 3)], hook)
    assert hook.done


def test_preemption(fresh):
    """Drafts of a request that gives way are forgotten."""
    stock, pdmux = fresh
    pool = pdmux.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 20)
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True, allowed_token_ids=[65, 66, 67])
    arrivals = [Arrival(f"r{i}", prompt(20 + 9 * i % 60, i), params, step=i) for i in range(8)]
    preempted = []
    original = pdmux.scheduler._preempt_request
    pdmux.scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request), original(request, *a, **k))
    try:
        got = pdmux.run(arrivals)
    finally:
        del pdmux.scheduler._preempt_request
        pool.free_blocks(taken)
    assert preempted
    assert_same(got, stock.run(arrivals))
