# SPDX-License-Identifier: Apache-2.0
"""The groups, layers and order of prompts that policy slo chooses, by numbers."""

import math

import pytest
from slo_cases import beside, calibrated, chosen, constant, decode, learning, load, needing, prefill, watched

from vllm_pdmux.policy import ALL_LAYERS, Decision, Prompt, Share, Target


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
        "itl_slo_ms is 13 but the best that is expected beside prefill is 13.8 ms: serving as near to it as "
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
        without_partitions.decide(load(oldest_wait_ms=10_001.0))
        assert slo.infeasible_decisions == without_partitions.infeasible_decisions == 0 and not said

    def test_without_a_target_of_the_user_it_says_where_the_target_comes_from(self):
        said = []
        slo = calibrated(None, 1000.0, (constant(2.0, 30.0),), said=said)
        slo.decide(load())
        assert said == [
            "itl_slo_ms is not set, so that the target is 1.5 x decode alone, 15 ms, but the best that is expected "
            "beside prefill is 23.0 ms: serving as near to it as possible; set it, or give a division with fewer SMs "
            "for prefill"
        ]

    @pytest.mark.parametrize(("itl_ms", "count"), [(1.15 * 13.2 - 0.01, 1), (1.15 * 13.2 + 0.01, 0)])
    def test_without_partitions_the_least_is_one_layer(self, itl_ms, count):
        """Of 3.2 ms, after 10 ms of decode."""
        said = []
        slo = calibrated(itl_ms, 1000.0, said=said, paced=False)
        slo.decide(load())
        assert slo.infeasible_decisions == len(said) == count
        for text in said:
            assert "expected beside prefill is 15.2 ms: " in text and text.endswith("give a smaller max_prefill_tokens")

    def test_without_partitions_nothing_is_said_of_what_is_not_known(self):
        nothing, no_rate = learning(1.0, paced=False), learning(1.0, paced=False)
        no_rate.observe(decode())
        for slo in (nothing, no_rate):
            slo.decide(load())
            assert slo.infeasible_decisions == 0

    def test_nor_one_that_is_in_reach(self):
        slo = calibrated(13.9)
        slo.decide(load())
        assert slo.infeasible_decisions == 0

    def test_what_is_hoped_for_is_in_what_is_said(self):
        """Not seen: 0.8 times what is expected of such a group."""
        said = []
        slo = learning(5.0, shares=[Share(False, 0.515)], said=said)
        slo.observe(decode())
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

    def test_while_the_fastest_group_is_safe_and_fast_enough_it_is_that_one(self):
        """Though another one would do with shorter steps."""
        slo = calibrated(100.0, 1000.0, (constant(2.0, 30.0), constant(1.6, 28.0)))
        assert chosen(slo, needing(27.0)) == [1], "none is in use yet"
        slo._stay = 0
        assert chosen(slo, needing(27.0)) == [1]

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
            slo = learning(17.5, ttft_ms)
            slo.observe(decode())
            return chosen(slo, load(oldest_wait_ms=wait_ms))

        assert group(0.0) == group(500.0) == group(5000.0, None) == [2]
        assert group(500.1) == [1]

    def test_a_rate_on_the_whole_device_is_one_that_is_known(self):
        slo = learning(17.5, 1000.0)
        slo.observe(decode())
        slo.observe(prefill())
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


class TestOrder:
    """10 tokens per ms and a target of 1 s: a prompt of 100 tokens that has just come has 990 ms to spare."""

    def slo(self, ttft_ms=1000.0):
        slo = learning(20.0, ttft_ms)
        slo.observe(prefill(10.0))
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
        slo.observe(decode())
        slo.decide(load())
        late, in_time, other = Prompt(10_100.0, 0.0), Prompt(9_900.0, 0.0), Prompt(1.0, 0.0)
        assert slo.overtakes(in_time, other) and not slo.overtakes(late, other)

    def test_without_a_target_or_a_rate_they_keep_their_order(self):
        first, second = self.prompt(4.0), self.prompt(5.0)
        assert self.slo().overtakes(first, second) and not self.slo(None).overtakes(first, second)
        unknowing = learning(20.0, 1000.0)
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
        unknowing = learning(46.0, paced=False)
        assert unknowing.decide(asked).layers == layers
        unknowing.observe(prefill())
        assert unknowing.decide(asked).layers == layers, "decode alone is not known"
        no_rate = learning(46.0, paced=False)
        no_rate.observe(decode())
        assert no_rate.decide(asked).layers == layers
        assert self.layers(46.0, load(model_layers=model_layers, prefill_work=0.0)) == layers


def test_before_decode_alone_is_known_it_gets_the_most_even_if_targets_are_loose():
    slo = learning(math.inf)
    assert chosen(slo, load()) == [3] and slo.infeasible_decisions == 0
