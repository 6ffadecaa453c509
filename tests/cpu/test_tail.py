# SPDX-License-Identifier: Apache-2.0
"""How much longer than usual slow steps take: all but 2 % of the last 250 steps count."""

import pytest

from vllm_pdmux.policy.tail import FIRST_TAIL, Tail


def after(*steps):
    """A tail that has seen so many steps of so many times what is usual."""
    tail = Tail()
    for count, times in steps:
        for _ in range(count):
            tail.see(times * 20.0, 20.0)
    return tail


def test_it_begins_with_steps_that_are_a_little_slow_and_are_forgotten_last():
    assert Tail().factor == after((244, 1.0)).factor == FIRST_TAIL
    assert after((245, 1.0)).factor == 1.02, "five of them are left, which are 2 %"


def test_two_percent_may_be_slower():
    assert after((250, 1.0), (5, 1.9)).factor == 1.02
    assert after((250, 1.0), (6, 1.9)).factor == 1.9
    assert after((250, 1.0), (3, 1.9), (3, 1.6)).factor == 1.6, "the fastest of the slow ones"


def test_what_is_slower_is_forgotten_after_as_many_steps_as_count_and_no_sooner():
    assert after((250, 1.0), (6, 1.9), (244, 1.0)).factor == 1.9
    assert after((250, 1.0), (6, 1.9), (245, 1.0)).factor == 1.02


@pytest.mark.parametrize(("times", "factor"), [(0.1, 1.02), (1.01, 1.02), (1.03, 1.03), (1.97, 1.97), (2.5, 2.0)])
def test_it_is_never_below_or_above_its_limits(times, factor):
    assert after((250, times)).factor == pytest.approx(factor)
