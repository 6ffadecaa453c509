# SPDX-License-Identifier: Apache-2.0
"""The slo policy's choices on a device that is as it was calibrated, by numbers.

A decode step of 10 requests with 30,000 tokens of context takes 10 ms alone, a half of it fixed, and prompts go at 40
tokens per ms. Beside prefill at 30, 20 and 10 tokens per ms it takes 20, 16 and 12 ms; slow steps take 1.15 times as
long at first: 23, 18.4 and 13.8 ms.
"""

import math
from types import SimpleNamespace

import pytest

from vllm_pdmux.policy import (
    ALL_LAYERS,
    LANE_EMPTY,
    SOONER,
    Decision,
    DecodeAlone,
    FusedPrior,
    GroupPrior,
    Kind,
    Load,
    Observation,
    Prior,
    Prompt,
    PromptWork,
    Share,
    SloPolicy,
    Target,
)

DECODE_MS = (5.0, 0.2, 0.0001)  # 5 + 2 + 3 ms
STEP = {"decode_batch": 10, "context_tokens": 30_000}
# By the parts of the decode step; in one that is twice as long as its fixed part.
GROUPS = (
    GroupPrior((1.0, 3.0, 3.0), (33.0, 3.0)),
    GroupPrior((1.0, 1.9, 2.4), (21.0, 1.0)),
    GroupPrior((1.0, 1.7, 1.2), (10.0, 0.0)),
)
SHARES = [Share(False, 0.8), Share(False, 0.6), Share(False, 0.4)]
ALONE_MS, FULL_RATE = 10.0, 40.0


def constant(slowdown, rate):
    """A group whatever the mix."""
    return GroupPrior((slowdown, slowdown, slowdown), (rate, 0.0))


def calibrated(itl_ms=None, ttft_ms=None, groups=GROUPS, paced=True, said=None, work=None, fused=None, graph_tokens=0):
    """Given a wrong size of the model, which a calibration makes needless."""
    return SloPolicy(
        SHARES[: len(groups)],
        Target(itl_ms, ttft_ms),
        DecodeAlone(1.0, 0.0),
        paced,
        (said if said is not None else []).append,
        work or PromptWork(),
        Prior(DECODE_MS, FULL_RATE, groups, fused),
        graph_tokens,
    )


def load(**others):
    return Load(**{**STEP, "prefill_tokens": 4096, "model_layers": 32, "prefill_work": 4096.0, **others})


def needing(rate, **others):
    """One first token is to come, and 750 ms are left for it of a target of 1 s."""
    return load(first_tokens=((rate * 750.0, 0.0),), **others)


def beside(step_ms, work=0.0, group=1):
    return Observation(Kind.BESIDE, step_ms, **STEP, prefill_work=work, group=group)


def chosen(slo, *loads):
    return [slo.decide(one).group for one in loads]


def watched(slo, factor=1.15):
    """What its tail is told of steps, as pairs of what was measured and what was expected; its factor stays."""
    seen = []
    slo._tail = SimpleNamespace(factor=factor, see=lambda *step: seen.append(step))
    return seen


class TestGroup:
    @pytest.mark.parametrize(
        ("itl_ms", "group"), [(100.0, 1), (23.01, 1), (22.99, 2), (18.41, 2), (18.39, 3), (13.81, 3), (1.0, 3)]
    )
    def test_it_is_the_fastest_whose_slow_steps_meet_the_target(self, itl_ms, group):
        assert calibrated(itl_ms).decide(load()) == Decision(group, ALL_LAYERS)

    def test_a_step_that_takes_just_the_target_meets_it(self):
        slo = calibrated(20.0, groups=(constant(1.6, 30.0), constant(1.2, 10.0)))
        watched(slo, factor=1.25)
        assert chosen(slo, load()) == [1]

    def test_it_follows_what_the_decode_step_consists_of(self):
        """Of 30 ms, the second: 1.0 times 5 and 2.4 times 25."""
        long = load(decode_batch=1, context_tokens=248_000)  # 5 + 0.2 + 24.8
        step_ms = [5 + 3.0 * 0.2 + 3.0 * 24.8, 5 + 1.9 * 0.2 + 2.4 * 24.8, 5 + 1.7 * 0.2 + 1.2 * 24.8]
        for group, ms in enumerate(step_ms, 1):
            assert chosen(calibrated(1.15 * ms + 0.01), long) == [group]
            assert chosen(calibrated(1.15 * ms - 0.01), long) == [min(group + 1, 3)]

    def test_without_a_target_it_is_half_more_than_decode_alone(self):
        assert chosen(calibrated(), load()) == [3], "15 ms"

    def test_of_groups_that_are_as_fast_it_is_the_one_with_shorter_steps(self):
        assert chosen(calibrated(100.0, groups=(constant(2.0, 20.0), constant(1.5, 20.0))), load()) == [2]

    def test_where_one_lane_has_nothing_to_do_the_other_has_it_all(self):
        slo = calibrated(20.0)
        assert slo.decide(load(decode_batch=0)) == Decision(0, ALL_LAYERS)
        assert slo.decide(load(prefill_tokens=0)) == Decision(4, 0)

    def test_what_was_not_seen_for_long_is_hoped_to_be_a_little_better(self):
        """Slow steps of 0.93 times 23 ms, 21.39 ms."""
        slo = calibrated(21.5)
        for _ in range(1000):
            slo._beside.add_decode(3, 1.2, slo._mix_of(load()))
        watched(slo)
        assert chosen(slo, load()) == [1]
        slo = calibrated(21.5)
        for _ in range(999):
            slo._beside.add_decode(3, 1.2, slo._mix_of(load()))
        assert chosen(slo, load()) == [2]


class TestOutOfReach:
    TEXT = (
        "itl_slo_ms is 13.0 but the best that is expected beside prefill is 13.8 ms: serving as near to it as "
        "possible; raise it, or give a division with fewer SMs for prefill"
    )

    def test_it_is_said_once_and_counted_each_time(self):
        said = []
        slo = calibrated(13.0, said=said)
        assert slo.infeasible_decisions == 0
        for count in (1, 2, 3):
            assert chosen(slo, load()) == [3]
            assert slo.infeasible_decisions == count and said == [self.TEXT]

    def test_what_is_not_a_target_of_the_user_is_not_counted(self):
        said = []
        slo = calibrated(3.0, said=said)
        assert chosen(slo, load(oldest_wait_ms=10_001.0)) == [3], "12 ms, which no group meets either"
        without_partitions = calibrated(3.0, said=said, paced=False)
        without_partitions.decide(load())
        assert slo.infeasible_decisions == without_partitions.infeasible_decisions == 0 and not said

    def test_nor_one_that_is_in_reach(self):
        slo = calibrated(13.9)
        slo.decide(load())
        assert slo.infeasible_decisions == 0

    def test_what_is_hoped_for_is_in_what_is_said(self):
        """Not seen: 0.8 times what is expected of such a group."""
        said = []
        slo = SloPolicy([Share(False, 0.515)], Target(5.0), DecodeAlone(1.0, 0.0), True, said.append)
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        slo.decide(load())
        assert f"is {10.0 * 1.41 * 0.8 * 1.15:.1f} ms: " in said[0]

    def test_where_no_group_keeps_it_even_usually_first_tokens_get_no_more(self):
        slo = calibrated(11.0, 1000.0)
        assert chosen(slo, needing(25.0)) == [3] and slo.infeasible_decisions == 1


class TestFirstTokens:
    """A target of 20 ms: slow steps of the second and the third group keep it, usual ones of the first do too."""

    @pytest.mark.parametrize(("needed", "group"), [(0.0, 2), (19.9, 2), (20.0, 2), (20.1, 1), (30.0, 1), (35.0, 1)])
    def test_where_the_safe_groups_are_too_slow_for_them_usual_steps_count(self, needed, group):
        assert chosen(calibrated(20.01, 1000.0), needing(needed)) == [group]

    def test_of_those_that_are_fast_enough_it_is_the_one_with_the_shortest_steps(self):
        groups = (constant(2.0, 30.0), constant(1.9, 25.0), constant(1.2, 10.0))
        assert chosen(calibrated(20.01, 1000.0, groups), needing(22.0)) == [2]
        assert chosen(calibrated(20.01, 1000.0, groups), needing(25.0)) == [2]
        assert chosen(calibrated(20.01, 1000.0, groups), needing(25.1)) == [1]
        assert chosen(calibrated(20.01, 1000.0, groups), needing(99.0)) == [1]
        assert chosen(calibrated(19.99, 1000.0, groups), needing(99.0)) == [2], "the fastest whose usual steps keep it"

    def test_one_whose_usual_steps_keep_the_target_just_so_counts(self):
        assert chosen(calibrated(20.0, 1000.0, (constant(2.0, 30.0), constant(1.5, 20.0))), needing(25.0)) == [1]

    def test_where_no_slow_step_keeps_the_target_usual_ones_count_as_well(self):
        slo = calibrated(13.0, 1000.0)
        assert chosen(slo, needing(0.01)) == [3] and slo.infeasible_decisions == 0

    def test_one_that_is_safe_is_left_for_only_with_something_to_spare(self):
        """The first is in use since much was needed; the second does 20."""
        slo = calibrated(20.01, 1000.0)
        assert chosen(slo, needing(25.0)) == [1]
        slo._stay = 0
        assert chosen(slo, needing(17.5)) == [1], "20 are not 1.15 times as many"
        assert chosen(slo, needing(17.3)) == [2]

    def test_one_that_is_fast_enough_is_left_for_one_with_shorter_steps_only_with_something_to_spare(self):
        groups = (constant(2.0, 30.0), constant(1.9, 25.0), constant(1.2, 10.0))
        slo = calibrated(20.01, 1000.0, groups)
        assert chosen(slo, needing(28.0)) == [1]
        slo._stay = 0
        assert chosen(slo, needing(21.8)) == [1]
        assert chosen(slo, needing(21.7)) == [2]

    def test_one_in_use_that_is_not_fast_enough_is_left(self):
        groups = (constant(2.0, 30.0), constant(1.9, 25.0), constant(1.2, 10.0))
        slo = calibrated(20.01, 1000.0, groups)
        assert chosen(slo, needing(22.0)) == [2]
        slo._stay = 0
        assert chosen(slo, needing(26.0)) == [1]

    def test_before_any_rate_is_known_they_are_at_risk_from_half_of_their_target_on(self):
        """Then it is the fastest group whose usual steps keep the target, else the one whose slow steps do."""

        def group(wait_ms, ttft_ms=1000.0):
            slo = SloPolicy(SHARES, Target(17.5, ttft_ms), DecodeAlone(1.0, 0.0), True, print)
            slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
            return chosen(slo, load(oldest_wait_ms=wait_ms))

        assert group(0.0) == group(500.0) == group(5000.0, None) == [2]
        assert group(500.1) == [1]

    def test_a_rate_on_the_whole_device_is_one_that_is_known(self):
        slo = SloPolicy(SHARES, Target(17.5, 1000.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=4000.0))
        assert chosen(slo, load(oldest_wait_ms=999.0)) == [2]
        slo._group = None
        # Never tried, the second is hoped to prefill at 40 * 0.6 * 0.65 / 0.8 = 19.5.
        assert chosen(slo, needing(19.4)) == [2]
        slo._group, slo._stay = None, 0
        assert chosen(slo, needing(19.6)) == [1]


class TestStaying:
    def test_a_new_group_stays_for_six_decisions_more(self):
        slo = calibrated(18.5)
        assert chosen(slo, load()) == [2]
        slo._target = Target(100.0)
        assert chosen(slo, *[load()] * 8) == [2, 2, 2, 2, 2, 2, 1, 1]

    def test_one_that_is_hardly_slower_stays(self):
        def after(rate):
            slo = calibrated(19.0, groups=(constant(2.0, rate), constant(1.6, 20.0)))
            assert chosen(slo, load()) == [2]
            slo._target, slo._stay = Target(100.0), 0
            return chosen(slo, load())

        assert (after(20.9), after(21.1)) == ([2], [1])

    def test_one_that_does_not_keep_the_target_any_more_is_left_though_it_is_faster(self):
        slo = calibrated(100.0)
        assert chosen(slo, load()) == [1]
        slo._target, slo._stay = Target(18.5), 0
        assert chosen(slo, load(), load()) == [2, 2]

    def test_steps_in_which_layers_of_the_group_before_may_run_say_nothing(self):
        slo = calibrated(100.0)
        seen = watched(slo)
        assert chosen(slo, load()) == [1]
        slo.observe(beside(25.0, 600.0, group=2))  # of the group before: neither learned nor counted
        for _ in range(2):
            slo.observe(beside(25.0, 600.0))
        assert not seen and slo._beside.slowdown(1, slo._mix_of(load())) == pytest.approx(2.0)
        slo.observe(beside(25.0, 600.0))
        assert seen == [(25.0, pytest.approx(20.0))]
        assert slo._beside.slowdown(1, slo._mix_of(load())) > 2.1
        slo.observe(beside(25.0, 600.0, group=2))
        assert len(seen) == 1


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
        slo = SloPolicy(SHARES, Target(1000.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=4000.0))
        assert slo.fused_tokens(asked) == 0, "decode alone is not known"
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        assert slo.fused_tokens(asked) == pytest.approx((1000 / 1.15 - 10) * 40, abs=1)
        slo = SloPolicy(SHARES, Target(1000.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
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
        slo = SloPolicy(SHARES, Target(92.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=4000.0))
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        assert slo.fused_tokens(load(waiting_work=100.0)) and slo.fused_reason == LANE_EMPTY
        assert not slo.fused_tokens(load(waiting_work=1e6)), "40 in the lane and 35 in fused steps"


class TestOrder:
    """10 tokens per ms and a target of 1 s: a prompt of 100 tokens that has just come has 990 ms to spare."""

    def slo(self, ttft_ms=1000.0):
        slo = SloPolicy(SHARES, Target(20.0, ttft_ms), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=1000.0))
        return slo

    def prompt(self, slack_ms):
        return Prompt(100.0, 990.0 - slack_ms)

    @pytest.mark.parametrize(
        ("waiting", "begun", "overtakes"),
        [
            (5.0, 5.0, False),  # in order of arrival
            (4.0, 5.0, True),
            (5.0, 4.0, False),
            (0.0, 5.0, True),  # just in time
            (0.25, 0.5, True),
            (0.0, -1.0, True),  # before one that is late
            (0.5, -1.0, True),
            (-1.0, -2.0, False),
            (-1.0, 0.0, False),
            (-1.0, 0.5, False),
        ],
    )
    def test_the_prompt_with_less_slack_goes_first_unless_it_is_late(self, waiting, begun, overtakes):
        assert self.slo().overtakes(self.prompt(waiting), self.prompt(begun)) == overtakes

    def test_work_takes_the_time_that_it_takes_in_the_group_in_use(self):
        """At 10 per ms in the third group both have as much slack; at 9.9 the long one has less, at 10.1 more."""
        slo = calibrated(14.0, 1000.0)
        short = lambda rate: Prompt(100.0, 1000.0 - 100.0 / 10.0 - (1000.0 - 5000.0 / rate))  # noqa: E731
        assert chosen(slo, load()) == [3]
        assert slo.overtakes(Prompt(5000.0, 0.0), short(10.1)) and not slo.overtakes(Prompt(5000.0, 0.0), short(9.9))

    def test_and_beside_the_decode_steps_in_use(self):
        """In the first group 30 per ms beside steps twice as long as their fixed part."""
        slo = calibrated(100.0, 1000.0)
        assert chosen(slo, load()) == [1]
        late, in_time = Prompt(30_100.0, 0.0), Prompt(29_900.0, 0.0)
        other = Prompt(1.0, 0.0)
        assert slo.overtakes(in_time, other) and not slo.overtakes(late, other)

    def test_before_a_group_was_in_use_that_of_the_whole_device_counts(self):
        slo = calibrated(100.0, 1000.0)
        late, in_time, other = Prompt(40_100.0, 0.0), Prompt(39_900.0, 0.0), Prompt(1.0, 0.0)
        assert slo.overtakes(in_time, other) and not slo.overtakes(late, other)

    def test_as_well_as_where_no_group_has_a_rate(self):
        slo = self.slo()
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        slo.decide(load())
        late, in_time, other = Prompt(10_100.0, 0.0), Prompt(9_900.0, 0.0), Prompt(1.0, 0.0)
        assert slo.overtakes(in_time, other) and not slo.overtakes(late, other)

    def test_without_a_target_or_a_rate_they_keep_their_order(self):
        first, second = self.prompt(4.0), self.prompt(5.0)
        assert self.slo().overtakes(first, second) and not self.slo(None).overtakes(first, second)
        unknowing = SloPolicy(SHARES, Target(20.0, 1000.0), DecodeAlone(1.0, 0.0), True, print)
        assert not unknowing.overtakes(first, second)


class TestLayers:
    """Without partitions. A prompt of 4,096 tokens through 32 layers: 3.2 ms each, after 10 ms of decode."""

    def layers(self, itl_ms, asked=None, **settings):
        return calibrated(itl_ms, 1000.0, paced=False, **settings).decide(asked or load()).layers

    @pytest.mark.parametrize(
        ("itl_ms", "layers"), [(46.0, 9), (1.15 * (10 + 9 * 3.2 - 0.1), 8), (1.15 * (10 + 9 * 3.2 + 0.1), 9), (1.0, 1)]
    )
    def test_as_many_as_slow_steps_may_have(self, itl_ms, layers):
        assert self.layers(itl_ms) == layers

    @pytest.mark.parametrize(
        ("needed", "layers"),
        [
            (29.0, 9),  # in less than 40 ms
            (30.9, 10),  # 10 / (1 - 30.9 / 40) = 43.96 ms
            (31.4, 11),  # 46.5 ms, and no more than the target
            (39.9, 11),
            (40.0, 11),
            (500.0, 11),
        ],
    )
    def test_more_where_first_tokens_need_it_but_no_more_than_usual_steps_may_have(self, needed, layers):
        assert self.layers(46.0, needing(needed)) == layers

    def test_thin_layers_take_some_time_and_there_are_never_more_than_all(self):
        thin = load(prefill_work=0.001)
        assert self.layers(1.15 * 10.1, thin) == pytest.approx(10, abs=1), "of 0.01 ms"
        assert self.layers(1e12, thin) == ALL_LAYERS

    @pytest.mark.parametrize(("model_layers", "layers"), [(32, 4), (33, 4), (39, 4), (40, 5), (8, 1), (3, 1)])
    def test_an_eighth_as_long_as_something_is_not_known(self, model_layers, layers):
        asked = load(model_layers=model_layers)
        unknowing = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), False, print)
        assert unknowing.decide(asked).layers == layers
        unknowing.observe(Observation(Kind.PREFILL, 100.0, prefill_work=4000.0))
        assert unknowing.decide(asked).layers == layers, "decode alone is not known"
        no_rate = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), False, print)
        no_rate.observe(Observation(Kind.DECODE, 10.0, **STEP))
        assert no_rate.decide(asked).layers == layers
        assert self.layers(46.0, load(model_layers=model_layers, prefill_work=0.0)) == layers


class TestExpected:
    """What metrics are told of a step."""

    def test_of_a_step_beside_prefill_what_was_decided_with(self):
        slo = calibrated(100.0)
        assert slo.expected_ms(beside(1.0)) is None, "no group is in use"
        slo.decide(load())
        for _ in range(2):
            assert slo.expected_ms(beside(1.0)) is None, "layers of another may be queued"
            slo.observe(beside(20.0, 600.0))
        assert slo.expected_ms(beside(1.0)) == pytest.approx(20.0)
        assert slo.expected_ms(beside(1.0, group=2)) is None
        assert slo.expected_ms(Observation(Kind.BESIDE, 1.0, 10, 80_000, group=1)) == pytest.approx(30.0)

    @pytest.mark.parametrize("kind", [Kind.DECODE, Kind.PREFILL, Kind.FUSED])
    @pytest.mark.parametrize("paced", [True, False])
    def test_of_others_nothing(self, kind, paced):
        slo = calibrated(100.0, paced=paced)
        slo.decide(load())
        slo._unsettled = 0
        step = Observation(kind, 20.0, **STEP, prefill_work=600.0, group=1)
        assert slo.expected_ms(step) is None

    def test_nothing_before_decode_alone_is_known(self):
        slo = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), False, print)
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=4000.0))
        assert slo.expected_ms(beside(20.0, 600.0)) is None

    def test_without_partitions_decode_and_what_goes_through(self):
        assert calibrated(46.0, paced=False).expected_ms(beside(1.0, 400.0)) == pytest.approx(10.0 + 10.0)

    def test_the_target_is_of_itl_or_follows_from_decode_alone(self):
        assert calibrated(46.0).target_ms(beside(1.0)) == 46.0
        assert calibrated().target_ms(beside(1.0)) == pytest.approx(15.0)
        assert calibrated().target_ms(Observation(Kind.BESIDE, 1.0, 10, 80_000)) == pytest.approx(22.5)
        unknowing = SloPolicy(SHARES, Target(), DecodeAlone(1.0, 0.0), True, print)
        assert unknowing.target_ms(beside(1.0)) is None


class TestLearning:
    def settled(self, itl_ms=100.0, **others):
        """The first group is in use, with none of another's layers."""
        slo = calibrated(itl_ms, **others)
        slo.decide(load())
        slo._unsettled = 0
        return slo

    def test_from_what_steps_of_one_lane_take(self):
        slo = calibrated(46.0)
        slo.observe(Observation(Kind.DECODE, 12.0, **STEP))
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0 * (1 + 0.2 / 6))
        slo.observe(Observation(Kind.PREFILL, 500.0, prefill_work=10_000.0))
        assert slo._full_rate.value == pytest.approx(30.0, rel=0.02)

    def test_not_from_a_clock_that_goes_backwards(self):
        for kind in Kind:
            slo = self.settled()
            before = slo._alone.ms(10, 30_000), slo._full_rate.value, slo._beside.beliefs()
            for step_ms in (-1.0, 0.0, 0.009):
                slo.observe(Observation(kind, step_ms, **STEP, prefill_work=1.0, group=1))
            assert before == (slo._alone.ms(10, 30_000), slo._full_rate.value, slo._beside.beliefs())
        slo.observe(Observation(Kind.DECODE, 0.01, **STEP))
        assert slo._alone.ms(10, 30_000) < 10.0

    def test_steps_beside_prefill_tell_of_their_group(self):
        slo = self.settled()
        seen, mix = watched(slo), slo._mix_of(load())
        slo.observe(beside(25.0, 500.0))  # 2.5 times decode alone, and 20 per ms
        assert seen == [(25.0, pytest.approx(20.0))]
        own = 1 + 0.25 / 3
        assert slo._beside.slowdown(1, mix) == pytest.approx(2.0 * own * (1 + (1.25 / own - 1) / 3))
        assert slo._beside.beliefs(mix)[0].rate == pytest.approx(20.0)
        assert slo._full_rate.value == 40.0

    def test_one_that_is_shorter_than_decode_alone_tells_of_that(self):
        slo = self.settled()
        slo.observe(beside(8.0, 500.0))
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0 - 2.0 / 6)

    def test_the_first_that_is_seen_is_believed_to_be_slowed_down_as_its_group_is(self):
        slo = SloPolicy([Share(False, 0.515)], Target(46.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(beside(14.1, 100.0))
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0)

    def test_steps_that_took_longer_than_the_target_are_counted(self):
        for kind in (Kind.BESIDE, Kind.FUSED):
            slo = self.settled(46.0)
            counts = []
            for step_ms in (46.0, 46.1, 1.0, 50.0):
                slo.observe(Observation(kind, step_ms, **STEP, prefill_work=100.0, group=1))
                counts.append(slo.missed_steps)
            assert counts == [0, 1, 1, 2]

    def test_those_of_another_group_as_well_and_without_a_target_by_decode_alone(self):
        for kind in (Kind.BESIDE, Kind.FUSED):
            slo = self.settled(None)
            slo.observe(Observation(kind, 14.9, **STEP, group=3))
            slo.observe(Observation(kind, 15.3, **STEP, group=2))
            assert slo.missed_steps == 1

    def test_fused_steps_tell_of_fused_steps(self):
        slo = calibrated(46.0, groups=(constant(2.0, 10.0),))
        slo.observe(Observation(Kind.FUSED, 48.0, **STEP, prefill_work=1200.0))  # 1.2 times what was expected
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(40.0 * (1 + 0.2 / 6))
        assert slo.fused_tokens(load(waiting_work=1e6)) < 1200
        assert slo._full_rate.value == FULL_RATE and slo._beside.slowdown(1) == 2.0

    def test_by_the_parts_of_the_decode_step(self):
        slo = calibrated(46.0, fused=FusedPrior((0.5, 1.0, 2.0), 0.8))
        slo.observe(Observation(Kind.FUSED, 1.2 * 34.5, **STEP, prefill_work=1200.0))  # 10.5 + 24 ms
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(34.5 * (1 + 0.2 / 6))

    @pytest.mark.parametrize("first", [Kind.PREFILL, Kind.DECODE])
    def test_but_not_before_decode_and_prefill_are_known(self, first):
        slo = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(first, 100.0, **STEP, prefill_work=4000.0))
        slo.observe(Observation(Kind.FUSED, 100.0, **STEP, prefill_work=1200.0))
        assert slo.missed_steps == 0

    def test_where_prefill_was_never_alone_the_groups_tell_what_fused_steps_should_take(self):
        slo = SloPolicy([Share(False, 0.8)], Target(46.0), DecodeAlone(1.0, 0.0), True, print)
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        slo.decide(load())
        slo._unsettled = 0
        slo.observe(beside(20.0, 0.52 * 40.0 * 20.0))  # of 0.8 of the SMs, at 0.65 of what they do alone
        slo.observe(Observation(Kind.FUSED, 48.0, **STEP, prefill_work=1200.0))
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(40.0 * (1 + 0.2 / 6))


class TestLearningWithoutPartitions:
    """One lane after the other: what is not decode is prefill."""

    def test_the_rest_of_a_step_tells_the_rate_of_prefill(self):
        slo = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), False, print)
        slo.observe(Observation(Kind.DECODE, 10.0, **STEP))
        seen = watched(slo)
        slo.observe(beside(20.0, 200.0))
        assert slo._full_rate.value == pytest.approx(20.0)
        assert seen == [(20.0, pytest.approx(10.0))], "only decode was expected"
        slo.observe(beside(40.0, 400.0))
        assert seen[1:] == [(40.0, pytest.approx(10.0 + 20.0))]
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0) and not slo._beside.knows_a_rate

    @pytest.mark.parametrize("step", [beside(20.0, 0.0), beside(9.0, 200.0)])
    def test_a_step_without_a_rest_or_without_work_says_nothing(self, step):
        slo = calibrated(8.0, paced=False)
        seen = watched(slo)
        slo.observe(step)
        assert not seen and slo._full_rate.value == FULL_RATE and slo._alone.ms(10, 30_000) == pytest.approx(10.0)
        assert slo.missed_steps == 1

    def test_nothing_is_learned_before_decode_alone_is_known(self):
        slo = SloPolicy(SHARES, Target(46.0), DecodeAlone(1.0, 0.0), False, print)
        slo.observe(beside(100.0, 200.0))
        assert slo._full_rate.value is None and slo.missed_steps == 0 and not slo._alone.is_known


def test_before_decode_alone_is_known_it_gets_the_most_even_if_targets_are_loose():
    slo = SloPolicy(SHARES, Target(math.inf), DecodeAlone(1.0, 0.0), True, print)
    assert chosen(slo, load()) == [3] and slo.infeasible_decisions == 0


def test_at_first_nothing_was_missed_and_nothing_fused():
    slo = calibrated(46.0)
    assert (slo.fused_reason, slo.missed_steps, slo.infeasible_decisions) == ("", 0, 0)
    assert slo.observes and slo.fuses
