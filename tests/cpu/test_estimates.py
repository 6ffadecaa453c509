# SPDX-License-Identifier: Apache-2.0
"""What a policy believes of step times, by numbers."""

import pytest

from vllm_pdmux.policy import DecodeAlone, GroupPrior, Mix, Share
from vllm_pdmux.policy.estimates import Average, Beside, Rate
from vllm_pdmux.policy.prior import ALL_FIXED

MIX = Mix(0.5, 0.2, 0.3)


class TestAverage:
    def test_the_first_samples_count_alike_and_the_first_as_it_is(self):
        average = Average(10.0)
        values = []
        for sample in (40.0, 50.0, 45.0, 41.0):
            average.add(sample)
            values.append(average.value)
        assert values == [40.0, 45.0, 45.0, 44.0]

    def test_a_prior_counts_as_its_steps(self):
        average = Average(1.0, 2)
        average.add(4.0)
        assert average.value == 2.0

    @pytest.mark.parametrize(("sample", "counts_as"), [(1000.0, 15.0), (0.001, 10.0 / 1.5), (14.0, 14.0), (7.0, 7.0)])
    def test_of_what_was_seen_before_a_sample_is_no_more_than_half_more_or_a_third_less(self, sample, counts_as):
        average = Average(10.0, 4, is_seen=True)
        average.add(sample)
        assert average.value == pytest.approx(10.0 + (counts_as - 10.0) / 5)
        assert average.is_seen

    @pytest.mark.parametrize("half_life", [20, 150])
    def test_half_is_forgotten_in_a_half_life_however_much_was_seen(self, half_life):
        average = Average(1.0, half_life_steps=half_life)
        for _ in range(1000):
            average.add(1.0)
        for _ in range(half_life):
            average.add(1.2)
        assert average.value == pytest.approx(1.1, abs=0.005)
        assert average.weight == pytest.approx(1.44 * half_life)


class TestRate:
    def test_it_is_unknown_until_there_was_work_that_took_time(self):
        rate = Rate()
        assert rate.value is None
        rate.add(0.0, 10.0)
        assert rate.value is None
        assert Rate(5.0, 0.0).value is None and Rate(0.5, 0.25).value == 2.0
        assert Rate(1e-3, 5.0).value is None and Rate(5.0, 1e-3).value is None, "not worth the name"

    def test_sums_count_and_not_the_rates_of_single_steps(self):
        rate = Rate(half_life_steps=10**9)
        for work, ms in ((100.0, 1.0), (20.0, 3.0), (0.0, 8.0)):
            rate.add(work, ms)
        assert rate.value == pytest.approx(10.0)

    @pytest.mark.parametrize("half_life", [20, 150])
    def test_half_is_forgotten_in_a_half_life(self, half_life):
        rate = Rate(1000.0, 100.0, half_life)
        for _ in range(half_life):
            rate.add(0.0, 0.0)
        assert (rate.work, rate.ms) == (pytest.approx(500.0), pytest.approx(50.0))
        rate.add(3.0, 5.0)
        assert rate.work == pytest.approx(503.0, rel=0.04) and rate.ms == pytest.approx(55.0, rel=0.04)

    def test_what_is_calibrated_counts_as_half_a_second(self):
        rate = Rate.calibrated(8.0)
        assert rate.value == 8.0
        rate.add(0.0, 500.0)
        assert rate.value == pytest.approx(4.0, rel=0.02)


class TestDecodeAlone:
    """A step of 2 requests with 100 tokens of context in all: 1,400 bytes of weights and what is fixed, as much as 900
    tokens of context for the requests, and the context."""

    def alone(self, *steps_ms):
        alone = DecodeAlone(1000.0, 10.0)
        for step_ms in steps_ms:
            alone.add(2, 100, step_ms)
        return alone

    def test_before_any_step_its_time_is_unknown_but_what_it_consists_of_is_known(self):
        alone = self.alone()
        assert not alone.is_known and alone.ms(2, 100) == 0.0
        assert alone.mix(2, 100) == pytest.approx((1400 / 11400, 9000 / 11400, 1000 / 11400))
        assert alone.mix(0, 0) == ALL_FIXED

    def test_one_step_tells_the_time_of_all_others(self):
        alone = self.alone(11.4)
        assert alone.is_known and alone.ms(2, 100) == pytest.approx(11.4)
        assert alone.ms(0, 0) == pytest.approx(1.4)
        assert alone.ms(4, 100) == pytest.approx(11.4 + 9.0)
        assert alone.ms(2, 1100) == pytest.approx(11.4 + 10.0)

    def test_of_the_first_five_the_fastest_counts_and_later_ones_are_averaged(self):
        assert self.alone(12.0, 10.0, 11.0, 14.0, 13.0).ms(2, 100) == pytest.approx(10.0)
        assert self.alone(12.0, 10.0, 11.0, 14.0, 9.0).ms(2, 100) == pytest.approx(9.0)
        assert self.alone(10.0, 10.0, 10.0, 10.0, 10.0, 11.0, 12.0).ms(2, 100) == pytest.approx(11.5)

    def test_the_first_step_beside_prefill_is_believed_to_be_slowed_down(self):
        alone = self.alone()
        alone.bound(2, 100, 20.0, 2.5)
        assert alone.ms(2, 100) == pytest.approx(8.0)

    def test_later_ones_count_only_where_they_are_shorter_than_decode_alone(self):
        alone = self.alone(10.0)
        alone.bound(2, 100, 10.5, 2.0)
        assert alone.ms(2, 100) == pytest.approx(10.0)
        alone.bound(2, 100, 9.0, 2.0)
        assert alone.ms(2, 100) == pytest.approx(9.0)
        alone.bound(4, 100, 15.0, 2.0)  # shorter than one of 4 takes, though longer than one of 2
        assert alone.ms(4, 100) == pytest.approx(15.0)

    def test_steps_that_are_longer_beside_prefill_do_not_use_up_the_first_ones(self):
        alone = self.alone(10.0)
        for _ in range(20):
            alone.bound(2, 100, 30.0, 2.0)
        alone.add(2, 100, 12.0)
        assert alone.ms(2, 100) == pytest.approx(10.0)

    def test_what_was_calibrated_is_three_times_and_counts_as_five_steps(self):
        alone = DecodeAlone.calibrated((5.0, 0.1, 0.002))
        assert alone.is_known and alone.ms(10, 500) == pytest.approx(5.0 + 1.0 + 1.0)
        assert alone.mix(10, 500) == pytest.approx((5 / 7, 1 / 7, 1 / 7))
        alone.add(10, 500, 8.4)  # a fifth more than expected
        assert alone.ms(10, 500) == pytest.approx(7.0 * (1 + 0.2 / 6))
        assert alone.ms(0, 0) == pytest.approx(5.0 * (1 + 0.2 / 6)), "the proportion of the three stays"
        outlier = DecodeAlone.calibrated((5.0, 0.1, 0.002))
        outlier.add(10, 500, 7000.0)
        assert outlier.ms(10, 500) == pytest.approx(7.0 * (1 + 0.5 / 6))


def capped(*shares):
    return [Share(False, share) for share in shares]


def beside(*slowdowns, rate=10.0):
    """Calibrated groups of falling shares for prefill; a slowdown is that of each part."""
    groups = [GroupPrior((slowdown, slowdown, slowdown), (rate, 0.0)) for slowdown in slowdowns]
    return Beside(capped(*(0.9 - 0.1 * place for place in range(len(slowdowns)))), groups)


def slowdowns(found, mix=ALL_FIXED):
    return [belief.slowdown for belief in found.beliefs(mix)]


def rates(found, mix=ALL_FIXED):
    return [belief.rate for belief in found.beliefs(mix)]


class TestPriors:
    @pytest.mark.parametrize(
        ("share", "slowdown", "rate"),
        [
            (Share(False, 0.515), 1.41, 0.33475),  # measured: 68 of 132 SMs
            (Share(False, 0.85), 2.016, 0.5525),
            (Share(False, 0.2), 1.1, 0.13),  # never less
            (Share(True, 0.5), 1.598, 0.43),
            (Share(True, 0.84), 3.755, 0.7224),
            (Share(True, 0.05), 1.05, 0.043),  # never less
            (Share(True, 0.99), 8.985, 0.8514),  # as with 95 %
        ],
    )
    def test_without_a_calibration_they_follow_from_the_division_whatever_the_mix(self, share, slowdown, rate):
        for mix in (ALL_FIXED, MIX):
            (belief,) = Beside([share]).beliefs(mix)
            assert belief.slowdown == pytest.approx(slowdown, abs=1e-3) and belief.rate == pytest.approx(rate)

    def test_what_was_calibrated_follows_the_mix(self):
        found = Beside(capped(0.8), [GroupPrior((1.0, 2.0, 3.0), (20.0, 4.0))])
        (belief,) = found.beliefs(MIX)
        assert belief.slowdown == pytest.approx(0.5 * 1 + 0.2 * 2 + 0.3 * 3) == found.slowdown(1, MIX)
        assert belief.rate == pytest.approx(16.0)  # the step is as long again as its fixed part
        assert slowdowns(found) == [1.0] and rates(found) == [20.0]

    def test_they_have_as_many_parts_as_a_decode_step(self):
        with pytest.raises(ValueError, match="zip"):
            GroupPrior((1.0, 2.0), (20.0, 4.0)).slowdown(MIX)

    def test_there_is_one_for_each_group(self):
        with pytest.raises(ValueError, match=r"^1 priors for 2 groups$"):
            Beside(capped(0.8, 0.6), [GroupPrior((1.0, 1.0, 1.0), (1.0, 0.0))])

    def test_of_parts_that_never_occur_nothing_is_divided_by_zero(self):
        assert Mix(0.5, 0.2, 0.3).added == 1.0 and Mix(1.0, 0.0, 0.0).added == 0.0
        assert Mix(0.0, 0.5, 0.5).added == pytest.approx(1e9)


class TestSlowdowns:
    """What a step says is shared: a third goes to its group, and a third of the rest to all groups."""

    def test_a_slow_step_is_believed_more_of_its_group_than_of_others(self):
        found = beside(2.0, 2.0)
        found.add_decode(2, 3.0)
        own, common = 1 + 0.5 / 11, 1 + (1.5 / (1 + 0.5 / 11) - 1) / 3
        assert slowdowns(found) == pytest.approx([2.0 * common, 2.0 * common]), "with fewer SMs for prefill not more"
        found = beside(2.0, 2.0)
        found.add_decode(1, 3.0)
        assert slowdowns(found) == pytest.approx([2.0 * own * common, 2.0 * common])
        assert found.slowdown(1) == slowdowns(found)[0] and found.slowdown(2) == slowdowns(found)[1]

    def test_it_is_learned_over_what_is_expected_of_this_mix(self):
        found = Beside(capped(0.8), [GroupPrior((1.0, 2.0, 3.0), (20.0, 0.0))])
        found.add_decode(1, 1.8, MIX)  # as expected
        assert slowdowns(found) == pytest.approx([1.0])
        assert slowdowns(found, MIX) == pytest.approx([1.8])

    def test_what_is_peculiar_to_a_group_stays_while_others_are_in_use_and_the_rest_passes(self):
        found = beside(2.0, 1.5)
        for _ in range(400):
            found.add_decode(1, 3.0)
        for _ in range(400):
            found.add_decode(2, 1.5)
        assert slowdowns(found) == pytest.approx([3.0, 1.5], rel=0.02)

    def test_what_is_peculiar_is_learned_slowly_and_the_rest_quickly(self):
        found = beside(2.0, 2.0)
        for _ in range(600):
            found.add_decode(1, 2.0)
        for _ in range(40):
            found.add_decode(1, 3.0)
        own, other = slowdowns(found)
        assert own == pytest.approx(2.9, rel=0.03) and 1.05 < own / other < 1.15

    def test_a_clock_that_is_wrong_counts_as_one_to_twenty_times(self):
        for said, is_like in ((1e9, 20.0), (0.001, 1.0)):
            wrong, right = beside(2.0), beside(2.0)
            wrong.add_decode(1, said)
            right.add_decode(1, is_like)
            assert wrong.beliefs() == right.beliefs()

    def test_decode_is_never_faster_than_alone(self):
        assert slowdowns(beside(1.1, 0.9)) == [1.1, 1.0]
        found = beside(1.2, 1.1)
        for _ in range(300):
            found.add_decode(2, 0.5)
        assert slowdowns(found) == [pytest.approx(1.2, rel=0.01), 1.0], "that is peculiar to the second"

    def test_with_fewer_sms_for_prefill_it_is_not_slower_than_with_more_however_groups_are_ordered(self):
        shares = [Share(False, 0.5), Share(True, 0.6), Share(False, 0.8), Share(True, 0.7)]
        priors = [GroupPrior((slow, slow, slow), (1.0, 0.0)) for slow in (1.9, 3.5, 1.7, 3.0)]
        assert slowdowns(Beside(shares, priors)) == [1.7, 3.0, 1.7, 3.0]

    def test_nothing_is_believed_to_be_more_than_twenty_times_as_slow(self):
        assert slowdowns(beside(30.0, 25.0, 3.0)) == [20.0, 20.0, 3.0]


class TestRates:
    def test_a_group_has_the_rate_that_was_seen_in_it_and_others_are_off_by_as_much(self):
        found = beside(2.0, 2.0, 2.0)
        found.add_prefill(1, 150.0, 10.0)
        assert rates(found) == pytest.approx([15.0, 15.0, 15.0])
        found.add_prefill(2, 50.0, 10.0)  # 0.5 times the prior, but 1.5 times are usual
        assert rates(found)[0] == pytest.approx(15.0) and rates(found)[1] == pytest.approx(5.0)
        assert rates(found)[2] == pytest.approx(10.0), "the mean of both"

    def test_what_all_groups_have_in_common_at_present_is_learned_quickly(self):
        found = beside(2.0, 2.0)
        for _ in range(600):
            found.add_prefill(1, 100.0, 10.0)
        for _ in range(40):
            found.add_prefill(1, 50.0, 10.0)
        assert rates(found)[0] == pytest.approx(rates(found)[1])
        assert 5.0 < rates(found)[0] < 6.3

    def test_it_is_learned_over_what_is_expected_of_this_mix(self):
        found = Beside(capped(0.8), [GroupPrior((2.0, 2.0, 2.0), (20.0, 4.0))])
        found.add_prefill(1, 160.0, 10.0, MIX)  # as expected
        assert rates(found) == pytest.approx([20.0]) and rates(found, MIX) == pytest.approx([16.0])

    def test_steps_in_which_no_work_went_through_say_nothing_yet(self):
        found = Beside(capped(0.8, 0.6))
        found.add_prefill(1, 0.0, 10.0)
        assert not found.knows_a_rate and found.full_rate is None
        assert rates(found) == pytest.approx([0.52, 0.39])

    def test_that_of_the_whole_device_follows_where_nothing_was_calibrated(self):
        found = Beside(capped(0.8, 0.6, 0.4))
        assert not found.knows_a_rate and found.full_rate is None
        found.add_prefill(1, 0.52 * 40 * 10, 10.0)
        assert found.knows_a_rate and found.full_rate == pytest.approx(40.0)
        found.add_prefill(2, 0.39 * 20 * 10, 10.0)
        assert found.full_rate == pytest.approx(30.0)

    def test_and_what_is_common_at_present_is_in_it(self):
        found = Beside(capped(0.8))
        for work in 600 * [52.0] + 40 * [26.0]:
            found.add_prefill(1, work, 10.0)
        assert found.full_rate == pytest.approx(rates(found)[0] / 0.52)
        assert 5.0 < found.full_rate < 6.3

    def test_and_does_not_where_something_was(self):
        found = beside(2.0)
        found.add_prefill(1, 100.0, 10.0)
        assert found.knows_a_rate and found.full_rate is None and beside(2.0).knows_a_rate


class TestHope:
    """What is not known is worth a try."""

    def hopes(self, found):
        return [belief.hope for belief in found.beliefs()]

    def test_of_a_group_that_was_never_seen_unless_it_was_calibrated(self):
        found = Beside(capped(0.8, 0.6))
        assert self.hopes(found) == [0.8, 0.8]
        found.add_decode(2, 1.5)
        assert self.hopes(found) == [0.8, 1.0]
        assert self.hopes(beside(2.0, 1.5)) == [1.0, 1.0]

    def test_of_one_that_was_calibrated_and_not_seen_in_the_first_thousand_steps(self):
        found = beside(2.0, 1.5)
        for _ in range(999):
            found.add_decode(2, 1.5)
        assert self.hopes(found) == [1.0, 1.0]
        found.add_decode(2, 1.5)
        assert self.hopes(found) == [0.93, 1.0]

    @pytest.mark.parametrize("found", [Beside(capped(0.8, 0.6)), beside(2.0, 1.5)], ids=["learned", "calibrated"])
    def test_and_of_one_that_was_not_seen_for_a_thousand_steps(self, found):
        found.add_decode(1, 1.5)
        for _ in range(999):
            found.add_decode(2, 1.5)
        assert self.hopes(found) == [1.0, 1.0]
        found.add_decode(2, 1.5)
        assert self.hopes(found) == [0.93, 1.0]
        found.add_decode(1, 1.5)
        assert self.hopes(found) == [1.0, 1.0]
