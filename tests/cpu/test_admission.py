# SPDX-License-Identifier: Apache-2.0
"""When a batch enters the prefill lane, and how large it is."""

import pytest

from vllm_pdmux.admission import SHORTEST_BATCH_TOKENS, Admission

LAYERS = 32


def admission(batches=2, most=None, layers=0, tokens=4096, steps=1):
    """After `steps` in which so many layers of a batch of `tokens` were launched."""
    found = Admission(LAYERS, batches, most)
    for _ in range(steps):
        found.launched([(layers, tokens)])
    return found


def test_the_next_batch_waits_until_half_of_the_layers_are_launched():
    assert [admission(layers=2).is_time(layers) for layers in (0, 15, 16, 32)] == [False, False, True, True]


def test_where_a_batch_lasts_for_few_steps_the_next_one_comes_earlier():
    assert admission(layers=7).is_time(11) and not admission(layers=7).is_time(10)
    assert admission(layers=16).is_time(0)


def test_a_fast_step_is_forgotten_in_time():
    found = admission(layers=16)
    for _ in range(20):
        found.launched([(1, 4096)])
    assert not found.is_time(15) and found.is_time(16)
    before = found.is_time(16)
    found.launched([])  # a step without the lane says nothing of its pace
    assert found.is_time(16) == before


@pytest.mark.parametrize(("first", "tokens"), [(10, SHORTEST_BATCH_TOKENS), (1500, 1500), (9000, 4096)])
def test_prompts_share_a_batch_only_until_it_is_long_enough(first, tokens):
    assert admission(most=4096).tokens(first) == tokens


def test_a_batch_lasts_for_some_steps():
    """8 of 32 layers of 4,096 tokens in a step are 1,024 tokens in a step."""
    assert admission(layers=8).tokens(10) == 4 * 1024
    assert admission(layers=8, most=2048).tokens(10) == 2048
    assert admission(layers=0).tokens(10) == SHORTEST_BATCH_TOKENS


@pytest.mark.parametrize("most", [None, 4096])
def test_with_one_batch_at_a_time_each_takes_all_that_waits(most):
    """Between two the lane is empty."""
    assert admission(batches=1, most=most, layers=4).tokens(10) == most


def test_two_batches_in_a_step_count_by_their_own_tokens():
    found = Admission(LAYERS, 2, None)
    found.launched([(8, 4096), (8, 2048)])
    assert found.tokens(10) == 4 * (1024 + 512)
