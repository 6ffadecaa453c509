# SPDX-License-Identifier: Apache-2.0
"""When policy slo fuses a step, and how many tokens of prompts are in it, by numbers."""

import pytest
from slo_cases import calibrated, constant, decode, learning, load, needing, prefill

from vllm_pdmux.policy import LANE_EMPTY, SOONER, FusedPrior, PromptWork


class TestFused:
    """40 tokens per ms and step, after 10 ms of decode: what fits 46 ms, of which slow steps take 1.15 times as long
    as usual, is (40 - 10) * 40 = 1,200 tokens, 30 per ms."""

    def slow_lane(self, itl_ms, **others):
        """Groups that prefill at 10 tokens per ms at most."""
        return calibrated(itl_ms, groups=(constant(2.0, 10.0),), **others)

    def test_it_is_as_many_tokens_as_slow_steps_may_have(self):
        assert self.slow_lane(46.0).fused_tokens(load(waiting_work=1e6)) == pytest.approx(1200, abs=1)
        assert self.slow_lane(92.0).fused_tokens(load(waiting_work=1e6)) == pytest.approx(2800, abs=1)

    @pytest.mark.parametrize("others", [{"waiting_work": 0.0}, {"decode_batch": 0}])
    def test_there_are_none_where_a_lane_has_nothing_to_do(self, others):
        assert self.slow_lane(46.0).fused_tokens(load(**{"waiting_work": 1e6, **others})) == 0

    def test_there_are_none_without_partitions_and_before_steps_were_seen(self):
        asked = load(waiting_work=100.0)
        assert self.slow_lane(46.0, paced=False).fused_tokens(asked) == 0
        slo = learning(1000.0)
        slo.observe(prefill())
        assert slo.fused_tokens(asked) == 0, "decode alone is not known"
        slo.observe(decode())
        assert slo.fused_tokens(asked) == pytest.approx((1000 / 1.15 - 10) * 40, abs=1)
        slo = learning(1000.0)
        slo.observe(decode())
        assert slo.fused_tokens(asked) == 0, "the rate is not known"

    def test_each_part_of_the_decode_step_counts_as_calibrated(self):
        """0.25 + 0.2 + 0.6 times decode alone, and 0.8 times the prompt."""
        slo = self.slow_lane(46.0, fused=FusedPrior((0.5, 1.0, 2.0), 0.8))
        assert slo.fused_tokens(load(waiting_work=1e6)) == pytest.approx((40 - 10.5) / 0.8 * 40, abs=1)

    def test_a_prompt_that_waits_for_too_long_makes_the_step_four_times_as_long(self):
        slo = self.slow_lane(None)
        assert slo.fused_tokens(load(waiting_work=1e6, oldest_wait_ms=10_000.0)) == 0, "15 ms"
        expected = (60 / 1.15 - 10) * 40
        assert slo.fused_tokens(load(waiting_work=1e6, oldest_wait_ms=10_001.0)) == pytest.approx(expected, abs=1)

    def test_where_first_tokens_need_more_a_usual_step_may_take_the_target(self):
        slo = self.slow_lane(92.0, ttft_ms=1000.0)
        few, many = (slo.fused_tokens(needing(rate, waiting_work=1e6)) for rate in (34.9, 35.1))
        assert few == pytest.approx(2800, abs=1) and many == pytest.approx((92 - 10) * 40, abs=1)

    def test_tokens_far_back_in_a_prompt_are_fewer(self):
        """A token costs 1.5 times as much, and at the end of the step a little more."""
        slo = self.slow_lane(46.0, work=PromptWork(10_000))
        tokens = slo.fused_tokens(load(waiting_work=1e6, computed_tokens=5000))
        assert tokens * (1.5 + tokens / 20_000) == pytest.approx(1200, abs=2)

    def test_a_step_of_few_tokens_is_not_worth_it(self):
        """Cut to the largest graph, which has as many tokens as decode 10 requests and 128 of a prompt."""
        itl_ms = 1.15 * (10 + 220 / 40)  # 220 tokens
        for graph_tokens, tokens in ((138, 128), (137, 0)):
            slo = calibrated(itl_ms, groups=(constant(2.0, 1.0),), graph_tokens=graph_tokens)
            assert slo.fused_tokens(load(waiting_work=1e6)) == tokens


class TestFusedOrLane:
    """A lane prefills at 30 tokens per ms. Its first batch ends 1.5 of its steps, of 20 ms, later: 30 ms.

    A step of 46, 92 and 30.67 ms has 30, 35 and 25 tokens per ms.
    """

    def tokens(self, itl_ms, waiting_work, **others):
        slo = calibrated(itl_ms, groups=(constant(2.0, 30.0),))
        found = slo.fused_tokens(load(waiting_work=waiting_work, **others)) > 0
        return found, slo.fused_reason

    def test_an_empty_lane_is_begun_where_prompts_end_sooner_in_spite_of_it(self):
        """At 25 per ms each token takes 1/150 ms more, so that 4,500 take 30 ms more."""
        itl_ms = 1.15 * 80 / 3
        assert self.tokens(itl_ms, 4450.0) == (True, LANE_EMPTY)
        assert self.tokens(itl_ms, 4550.0) == (False, LANE_EMPTY)

    def test_a_busy_one_is_left_where_they_end_sooner_by_a_twentieth_in_spite_of_it(self):
        """At 35 per ms 1,000 take 28.57 ms, 30 with a twentieth more, and 33.33 in the lane: 9,000 save 30 ms."""
        assert self.tokens(92.0, 9100.0, is_lane_busy=True) == (True, SOONER)
        assert self.tokens(92.0, 8900.0, is_lane_busy=True) == (False, SOONER)
        assert self.tokens(92.0, 1.0) == (True, SOONER), "an empty one"

    def test_what_is_before_the_prompts_counts_in_the_rate_of_fused_steps(self):
        """Work is what a lane's rate is of too: of tokens alone a step would have two thirds as much."""
        slo = calibrated(1.15 * 80 / 3, groups=(constant(2.0, 30.0),), work=PromptWork(10_000))
        assert slo.fused_tokens(load(waiting_work=4400.0, computed_tokens=5000)) > 0
        assert slo.fused_tokens(load(waiting_work=4600.0, computed_tokens=5000)) == 0

    def test_the_lane_is_the_group_that_would_be_chosen(self):
        """Of 22.9 ms, the second with 20 tokens per ms: (19.9 - 10) * 40 / 19.9 = 19.9 in fused steps."""
        slo = calibrated(22.9)
        assert slo.fused_tokens(load(waiting_work=100.0)) == pytest.approx(396, abs=1)
        assert slo.fused_reason == LANE_EMPTY
        faster = calibrated(23.1)  # 20.1 in fused steps, and 30 in the first
        assert not faster.fused_tokens(load(waiting_work=1e6))

    def test_a_lane_whose_rate_is_not_known_is_believed_to_be_as_fast_as_the_whole_device(self):
        slo = learning(92.0)
        slo.observe(prefill())
        slo.observe(decode())
        assert slo.fused_tokens(load(waiting_work=100.0)) and slo.fused_reason == LANE_EMPTY
        assert not slo.fused_tokens(load(waiting_work=1e6)), "40 in the lane and 35 in fused steps"
