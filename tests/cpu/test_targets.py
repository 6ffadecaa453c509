# SPDX-License-Identifier: Apache-2.0
"""What a load should keep: ITL, and the rate of prefill that first tokens need."""

import pytest

from vllm_pdmux.policy import Load, Target
from vllm_pdmux.policy.deadline import needed_rate


class TestItl:
    def test_without_one_it_is_half_more_than_decode_alone(self):
        assert Target().of(20.0) == 30.0 and Target().of(0.0) == 0.0

    def test_what_is_asked_for_counts_whatever_decode_takes_alone(self):
        assert Target(12.0).of(20.0) == Target(12.0).of(1.0) == 12.0
        assert Target(0.0).of(20.0) == 0.0

    def test_a_prompt_that_waits_for_more_than_ten_seconds_lets_it_grow_to_four_times(self):
        assert Target(12.0).of(20.0, 10_000.0) == 12.0
        assert Target(12.0).of(20.0, 10_000.1) == 48.0
        assert Target().of(20.0, 10_000.1) == 120.0

    def test_or_after_what_was_set_to_what_was_set(self):
        target = Target(12.0, None, 500.0, 15.0)
        assert (target.of(20.0, 500.0), target.of(20.0, 500.1)) == (12.0, 15.0)
        assert Target(12.0, None, 500.0, 9.0).of(20.0, 501.0) == 12.0, "never below the target"
        assert Target(12.0, None, 0.0).of(20.0) == 12.0 < Target(12.0, None, 0.0).of(20.0, 0.1)


class TestNeededRate:
    """With three quarters of the target, 750 ms, planned."""

    def needed(self, *first_tokens, ttft_ms=1000.0):
        return needed_rate(Load(1, 1, 1, first_tokens=first_tokens), ttft_ms)

    def test_it_is_the_work_over_the_time_that_is_left(self):
        assert self.needed((1500.0, 0.0)) == 2.0
        assert self.needed((1500.0, 250.0)) == 3.0
        assert self.needed((1500.0, 0.0), ttft_ms=500.0) == 4.0

    @pytest.mark.parametrize(
        ("left_ms", "rate"), [(0.5, 200.0), (1.0, 100.0), (0.0, float("inf")), (-1.0, float("inf"))]
    )
    def test_it_grows_until_no_time_is_left(self, left_ms, rate):
        assert self.needed((100.0, 750.0 - left_ms)) == rate

    def test_nothing_is_needed_for_what_has_no_work_or_no_target(self):
        assert self.needed() == self.needed((0.0, 0.0)) == self.needed((0.0, 5000.0)) == 0.0
        assert self.needed((100.0, 5000.0), ttft_ms=None) == 0.0
