# SPDX-License-Identifier: Apache-2.0
"""What policy slo expects of steps, and what it learns from them, by numbers."""

import pytest
from slo_cases import (
    ALONE_MS,
    FULL_RATE,
    STEP,
    beside,
    calibrated,
    constant,
    decode,
    fused,
    learning,
    load,
    prefill,
    watched,
)

from vllm_pdmux.policy import FusedPrior, Kind, Observation, Share


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

    def test_nothing_without_partitions_before_a_rate_is_known(self):
        slo = learning(46.0, paced=False)
        slo.observe(decode())
        assert slo.expected_ms(beside(20.0, 600.0)) is None

    def test_nothing_before_decode_alone_is_known(self):
        slo = learning(46.0, paced=False)
        slo.observe(prefill())
        assert slo.expected_ms(beside(20.0, 600.0)) is None

    def test_without_partitions_decode_and_what_goes_through(self):
        assert calibrated(46.0, paced=False).expected_ms(beside(1.0, 400.0)) == pytest.approx(10.0 + 10.0)

    def test_the_target_is_of_itl_or_follows_from_decode_alone(self):
        assert calibrated(46.0).target_ms(beside(1.0)) == 46.0
        assert calibrated().target_ms(beside(1.0)) == pytest.approx(15.0)
        assert calibrated().target_ms(Observation(Kind.BESIDE, 1.0, 10, 80_000)) == pytest.approx(22.5)
        unknowing = learning()
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
        slo.observe(decode(12.0))
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
        slo.observe(decode(0.01))
        assert slo._alone.ms(10, 30_000) < 10.0

    def test_steps_beside_prefill_tell_of_their_group(self):
        slo = self.settled()
        seen, mix = watched(slo), slo._mix_of(load())
        slo.observe(beside(25.0, 500.0))  # 2.5 times decode alone, and 20 per ms
        assert seen == [(25.0, pytest.approx(20.0))]
        own = 1 + 0.25 / 11
        assert slo._beside.slowdown(1, mix) == pytest.approx(2.0 * own * (1 + (1.25 / own - 1) / 3))
        assert slo._beside.beliefs(mix)[0].rate == pytest.approx(20.0)
        assert slo._full_rate.value == 40.0

    def test_one_that_is_shorter_than_decode_alone_tells_of_that(self):
        slo = self.settled()
        slo.observe(beside(8.0, 500.0))
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0 - 2.0 / 6)

    def test_the_first_that_is_seen_is_believed_to_be_slowed_down_as_its_group_is(self):
        slo = learning(46.0, shares=[Share(False, 0.515)])
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
        slo.observe(fused(48.0))  # 1.2 times what was expected
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(40.0 * (1 + 0.2 / 6))
        assert slo.fused_tokens(load(waiting_work=1e6)) < 1200
        assert slo._full_rate.value == FULL_RATE and slo._beside.slowdown(1) == 2.0

    def test_by_the_parts_of_the_decode_step(self):
        slo = calibrated(46.0, fused=FusedPrior((0.5, 1.0, 2.0), 0.8))
        slo.observe(fused(1.2 * 34.5))  # 10.5 + 24 ms
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(34.5 * (1 + 0.2 / 6))

    @pytest.mark.parametrize("first", [Kind.PREFILL, Kind.DECODE])
    def test_but_not_before_decode_and_prefill_are_known(self, first):
        slo = learning(46.0)
        slo.observe(Observation(first, 100.0, **STEP, prefill_work=4000.0))
        slo.observe(fused(100.0))
        assert slo.missed_steps == 0

    def test_where_prefill_was_never_alone_the_groups_tell_what_fused_steps_should_take(self):
        slo = learning(46.0, shares=[Share(False, 0.8)])
        slo.observe(decode())
        slo.decide(load())
        slo._unsettled = 0
        slo.observe(beside(20.0, 0.52 * 40.0 * 20.0))  # of 0.8 of the SMs, at 0.65 of what they do alone
        slo.observe(fused(48.0))
        step_ms = slo._fused.ms(1200.0, ALONE_MS, slo._mix_of(load()), FULL_RATE)
        assert step_ms == pytest.approx(40.0 * (1 + 0.2 / 6))


class TestLearningWithoutPartitions:
    """One lane after the other: what is not decode is prefill."""

    def test_the_rest_of_a_step_tells_the_rate_of_prefill(self):
        slo = learning(46.0, paced=False)
        slo.observe(decode())
        seen = watched(slo)
        slo.observe(beside(20.0, 200.0))
        assert slo._full_rate.value == pytest.approx(20.0)
        assert seen == [(20.0, pytest.approx(10.0))], "only decode was expected"
        slo.observe(beside(40.0, 400.0))
        assert seen[1:] == [(40.0, pytest.approx(10.0 + 20.0))]
        assert slo._alone.ms(10, 30_000) == pytest.approx(10.0) and not slo._beside.knows_a_rate

    @pytest.mark.parametrize("step", [beside(20.0, 0.0), beside(9.0, 200.0), beside(10.0, 200.0)])
    def test_a_step_without_a_rest_or_without_work_says_nothing(self, step):
        slo = calibrated(8.0, paced=False)
        seen = watched(slo)
        slo.observe(step)
        assert not seen and slo._full_rate.value == FULL_RATE and slo._alone.ms(10, 30_000) == pytest.approx(10.0)
        assert slo.missed_steps == 1

    def test_nothing_is_learned_before_decode_alone_is_known(self):
        slo = learning(46.0, paced=False)
        slo.observe(beside(100.0, 200.0))
        assert slo._full_rate.value is None and slo.missed_steps == 0 and not slo._alone.is_known


def test_at_first_nothing_was_missed_and_nothing_fused():
    slo = calibrated(46.0)
    assert (slo.fused_reason, slo.missed_steps, slo.infeasible_decisions) == ("", 0, 0)
    assert slo.observes and slo.fuses


def test_two_slow_steps_at_the_beginning_do_not_have_a_calibrated_division_left_for_good():
    """What is believed of a division is corrected only by its own steps, which there are none of when it is left."""
    slo, took_ms, rates = calibrated(itl_ms=25.0), (20.0, 16.0, 12.0), (30.0, 20.0, 10.0)
    used = []
    for number in range(60):
        used.append(slo.decide(load()).group)
        step_ms = 27.5 if number in (2, 3) else took_ms[used[-1] - 1]
        slo.observe(beside(step_ms, step_ms * rates[used[-1] - 1], used[-1]))
    assert used[:4] == [1] * 4
    assert used.count(1) > 40 and used[-20:] == [1] * 20, "with a prior that counts as two steps it is 7 and 0"
