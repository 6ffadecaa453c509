# SPDX-License-Identifier: Apache-2.0
"""The work of prompts: tokens, which cost more the more tokens are before them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pdmux.policy import PromptWork


@given(st.floats(1e3, 1e6), st.integers(1, 100_000), st.integers(0, 200_000))
def test_tokens_is_the_inverse(doubling, tokens, computed):
    work = PromptWork(doubling)
    assert abs(work.tokens(work.of(tokens, computed), computed) - tokens) <= 1


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (64, 0), (100, 1024), (4096, 1024), (4096, 65536), (0, 7)])
def test_what_a_number_of_tokens_costs_is_enough_for_just_these(tokens, computed):
    work = PromptWork(1024)  # a power of two: no error of rounding
    assert work.tokens(work.of(tokens, computed), computed) == tokens
    assert work.tokens(work.of(tokens, computed) + 0.5, computed) == tokens, "half a token is none"


def test_a_token_far_back_costs_twice():
    work = PromptWork(20_000)
    assert work.of(1, 20_000) == pytest.approx(2, rel=1e-3)
    assert PromptWork().of(500, 10**6) == 500 and PromptWork().tokens(500.0, 10**6) == 500


def test_a_token_costs_what_is_before_it_and_a_half_of_what_comes_with_it():
    work = PromptWork(1000)
    assert work.of(200) == 200 * 1.1  # the first costs 1, the last 1.2
    assert work.of(200, 500) == 200 * 1.6  # 1.5 to 1.7
    assert work.tokens(200 * 1.1 + 1e-6, 0) == work.tokens(200 * 1.6 + 1e-6, 500) == 200


def test_chunks_cost_what_the_whole_costs():
    work = PromptWork(30_000)
    assert sum(work.of(1000, 1000 * i) for i in range(8)) == pytest.approx(work.of(8000))
