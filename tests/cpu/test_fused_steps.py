# SPDX-License-Identifier: Apache-2.0
"""What is believed of fused steps, by numbers: decode alone takes 10 ms, prompts go at 40 tokens per ms.

Without a calibration a step takes the sum of both, and 15 ms at least.
"""

import pytest

from vllm_pdmux.policy.fused import FusedSteps
from vllm_pdmux.policy.prior import ALL_FIXED, FusedPrior, Mix

MIX = Mix(0.5, 0.2, 0.3)
DEVICE = (10.0, MIX, 40.0)
CALIBRATED = FusedPrior((0.5, 1.0, 2.0), 0.8)  # 0.25 + 0.2 + 0.6 = 1.05 times decode alone, 0.8 times the prompt


def work_of(fused, step_ms):
    return fused.work(step_ms, *DEVICE)


def learn(fused, step_ms, work, times=1):
    for _ in range(times):
        fused.learn(step_ms, work, *DEVICE)


class TestBelief:
    def test_a_step_takes_the_sum_but_never_less_than_the_floor(self):
        assert [FusedSteps().ms(work, *DEVICE) for work in (0.0, 200.0, 201.0, 1200.0)] == [15.0, 15.0, 15.025, 40.0]

    def test_of_a_calibration_each_part_counts_by_itself_and_the_floor_is_decode_alone(self):
        fused = FusedSteps(CALIBRATED)
        assert fused.ms(1000.0, *DEVICE) == pytest.approx(10.5 + 20.0)
        assert fused.work(30.5, *DEVICE) == pytest.approx(1000.0)
        assert fused.ms(0.0, 10.0, ALL_FIXED, 40.0) == 10.0

    @pytest.mark.parametrize("step_ms", [15.0, 15.1, 22.0, 40.0, 400.0])
    def test_the_work_that_fits_takes_as_long_as_was_asked(self, step_ms):
        fused = FusedSteps()
        assert fused.ms(work_of(fused, step_ms), *DEVICE) == pytest.approx(step_ms)

    def test_at_the_floor_some_fits_and_below_it_none(self):
        assert (work_of(FusedSteps(), 15.0), work_of(FusedSteps(), 14.99)) == (200.0, 0.0)

    def test_little_is_more_than_none(self):
        assert work_of(FusedSteps(CALIBRATED), 10.51) == pytest.approx(0.5)
        assert work_of(FusedSteps(CALIBRATED), 10.49) == 0.0


class TestGraphs:
    @pytest.mark.parametrize(
        ("tokens", "expected"), [(400, 400), (480, 480), (481, 480), (991, 480), (992, 992), (993, 993)]
    )
    def test_what_is_above_the_largest_and_below_twice_of_it_is_cut(self, tokens, expected):
        assert FusedSteps(graph_tokens=512).with_a_graph(tokens, 32) == expected

    def test_without_graphs_nothing_is_cut(self):
        assert FusedSteps().with_a_graph(400, 32) == 400


class TestLearning:
    """What was believed counts as five steps, so that the first one is a sixth."""

    def test_a_longer_step_makes_steps_longer_and_their_work_less(self):
        fused = FusedSteps()
        learn(fused, 48.0, 1200.0)  # 1.2 times what was expected
        times = 1 + 0.2 / 6
        assert fused.ms(1200.0, *DEVICE) == pytest.approx(40.0 * times)
        assert work_of(fused, 40.0 * times) == pytest.approx(1200.0)
        assert fused.ms(0.0, *DEVICE) == 15.0, "the floor is as before"

    def test_a_step_at_the_floor_says_nothing_of_longer_ones(self):
        fused = FusedSteps()
        learn(fused, 18.0, 100.0)  # 1.8 times decode alone
        assert fused.ms(0.0, *DEVICE) == pytest.approx(15.0 + 3.0 / 6)
        assert fused.ms(1200.0, *DEVICE) == 40.0

    def test_a_step_counts_as_half_more_than_was_believed_at_most(self):
        fused = FusedSteps()
        learn(fused, 120.0, 1200.0)
        learn(fused, 40.0, 0.0)
        assert fused.ms(0.0, *DEVICE) == pytest.approx(15.0 + 7.5 / 6)
        assert fused.ms(1200.0, *DEVICE) == pytest.approx(40.0 * (1 + 0.5 / 6 * 6 / 7)), "the second doubts the first"

    @pytest.mark.parametrize(("step_ms", "floor_ms"), [(5.0, 10.0), (1e6, 40.0)])
    def test_the_floor_is_one_to_four_times_decode_alone_at_most(self, step_ms, floor_ms):
        fused = FusedSteps()
        learn(fused, step_ms, 0.0, 500)
        assert fused.ms(0.0, *DEVICE) == pytest.approx(floor_ms, rel=1e-3)

    @pytest.mark.parametrize(("step_ms", "times"), [(1.0, 0.3), (1e6, 3.0)])
    def test_longer_steps_take_three_tenths_to_three_times_what_was_expected_at_most(self, step_ms, times):
        fused = FusedSteps()
        learn(fused, step_ms, 40_000.0, 500)
        assert fused.ms(40_000.0, *DEVICE) == pytest.approx(1010.0 * times, rel=1e-3)

    def test_the_tail_is_of_longer_steps_over_what_was_then_expected(self):
        fused = FusedSteps()
        learn(fused, 10.2, 0.0, 300)
        assert fused.tail.factor == 1.15, "nothing was seen of it"
        learn(fused, 52.0, 1200.0, 300)
        assert fused.tail.factor == 1.02, "1.3 times what was believed first, and as expected at last"
        learn(fused, 1.5 * fused.ms(1200.0, *DEVICE), 1200.0, 6)
        assert 1.2 < fused.tail.factor < 1.5


class TestDoubt:
    """A slow step makes others short, or stops them: nothing would show that longer ones are not slow any more."""

    def slow(self):
        fused = FusedSteps()
        learn(fused, 60.0, 1200.0)
        return fused

    def test_a_short_step_after_a_slow_one_takes_a_little_of_it_back(self):
        fused = self.slow()
        believed_ms = fused.ms(1200.0, *DEVICE)
        learn(fused, 15.0, 100.0)
        assert 40.0 < fused.ms(1200.0, *DEVICE) == pytest.approx(40.0 + (believed_ms - 40.0) * 6 / 7)

    def test_what_is_not_believed_to_be_slow_is_not_doubted(self):
        usual, fast = FusedSteps(), FusedSteps()
        learn(fast, 36.0, 1200.0)
        believed_ms = fast.ms(1200.0, *DEVICE)
        for fused in (usual, fast):
            learn(fused, 15.0, 100.0, 40)
        assert fast.ms(1200.0, *DEVICE) == believed_ms
        learn(usual, 48.0, 1200.0)
        assert usual.ms(1200.0, *DEVICE) == pytest.approx(40.0 * (1 + 0.2 / 6)), "as if the short ones had not been"

    def test_fifty_questions_in_a_row_that_are_answered_with_none_take_a_little_of_it_back(self):
        fused = self.slow()
        believed_ms = fused.ms(1200.0, *DEVICE)
        for _ in range(49):
            work_of(fused, 12.0)
        assert fused.ms(1200.0, *DEVICE) == believed_ms
        work_of(fused, 12.0)
        once_ms = fused.ms(1200.0, *DEVICE)
        assert once_ms == pytest.approx(40.0 + (believed_ms - 40.0) * 6 / 7)
        for _ in range(49):
            work_of(fused, 12.0)
        assert fused.ms(1200.0, *DEVICE) == once_ms
        work_of(fused, 12.0)
        assert fused.ms(1200.0, *DEVICE) < once_ms

    def test_an_answer_with_some_work_begins_the_count_anew(self):
        fused = self.slow()
        believed_ms = fused.ms(1200.0, *DEVICE)
        for _ in range(49):
            work_of(fused, 12.0)
        assert work_of(fused, 40.0) > 0
        for _ in range(49):
            work_of(fused, 12.0)
        assert fused.ms(1200.0, *DEVICE) == believed_ms
        work_of(fused, 12.0)
        assert fused.ms(1200.0, *DEVICE) < believed_ms
