# SPDX-License-Identifier: Apache-2.0
"""The slo policy, on simulated devices that are not what it believes at first."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pdmux.policy import (
    ALL_LAYERS,
    DecodeAlone,
    FixedPolicy,
    Kind,
    LayerRule,
    Load,
    Observation,
    Prompt,
    Share,
    SloPolicy,
    Target,
)
from vllm_pdmux.policy.deadline import TTFT_PLANNED, needed_rate
from vllm_pdmux.policy.fused import FusedSteps
from vllm_pdmux.policy.prior import ALL_FIXED, FusedPrior, GroupPrior, Mix
from vllm_pdmux.policy.tail import FIRST_TAIL

CAPPED = [Share(False, sms / 132) for sms in (112, 100, 84, 68, 52)]
DISJOINT = [Share(True, sms / 132) for sms in (100, 84, 68)]
WEIGHTS, KV = 16e9, 131072


def policy(shares, itl_ms=None, paced_by_device=True, log=None):
    said = [] if log is None else log
    return SloPolicy(shares, Target(itl_ms), DecodeAlone(WEIGHTS, KV), paced_by_device, said.append)


def load(decode_batch=32, context_tokens=65536, prefill_tokens=4096, **others):
    """Many prompts wait."""
    found = Load(decode_batch, prefill_tokens, 32, context_tokens, prefill_tokens, **{"waiting_work": 1e6, **others})
    return found if "first_tokens" in others else replace(found, first_tokens=((found.waiting_work, 0.0),))


class Device:
    """What is true: decode alone, and for each group the slowdown and tokens per ms; with noise."""

    FULL_RATE = 38.0

    def __init__(self, shares, seed=0, error=0.0, noise=0.05):
        self._random = random.Random(seed)
        self._noise = noise
        self.may_fuse = False  # whether the policy is asked
        draw = lambda: 1 + self._random.uniform(-error, error)  # noqa: E731
        self.slowdowns = self._monotone(shares, [draw() * self._slowdown(share) for share in shares])
        self.rates = [
            draw() * self.FULL_RATE * share.prefill_share * (0.86 if share.is_disjoint else 0.65) for share in shares
        ]

    @staticmethod
    def _monotone(shares, values):
        """With more SMs for prefill decode is never faster, whatever the error."""
        found = list(values)
        for kind in (False, True):
            places = sorted(
                (p for p, s in enumerate(shares) if s.is_disjoint == kind), key=lambda p: shares[p].prefill_share
            )
            for place, value in zip(places, sorted(values[place] for place in places), strict=True):
                found[place] = value
        return found

    @staticmethod
    def _slowdown(share):
        if share.is_disjoint:
            return 0.95 * (1 - share.prefill_share) ** -0.75
        return max(1.1, 1.41 + 1.81 * (share.prefill_share - 0.515))

    def alone_ms(self, load):
        return 1.4 + 0.0127 * load.decode_batch + 0.219e-9 * (16e9 + KV * load.context_tokens)

    def step(self, policy, load):
        """One step with both lanes busy; (what was decided, its ms)."""
        fused = policy.fused_tokens(load) if self.may_fuse else 0
        alone_ms = self.alone_ms(load)
        noise = 1 + abs(self._random.gauss(0, self._noise))
        if fused:
            ms = noise * max(1.5 * alone_ms, alone_ms + fused / self.FULL_RATE)
            policy.observe(self._seen(Kind.FUSED, ms, load, fused))
            return "fused", ms
        group = policy.decide(load).group
        ms = noise * alone_ms * self.slowdowns[group - 1]
        policy.observe(self._seen(Kind.BESIDE, ms, load, self.rates[group - 1] * ms, group))
        return group, ms

    def warm_up(self, policy, load, prefill=True):
        """Steps of decode alone, and of prefill alone."""
        self.may_fuse |= prefill
        for _ in range(30):
            policy.observe(self._seen(Kind.DECODE, self.alone_ms(load), load, 0))
            if prefill:
                policy.observe(Observation(Kind.PREFILL, 4096 / self.FULL_RATE, prefill_work=4096))

    def _seen(self, kind, ms, load, tokens, group=0):
        return Observation(kind, ms, load.decode_batch, load.context_tokens, tokens, group)

    def best(self, load, target_ms):
        """The rate of the best group in hindsight: of those whose slow steps, with this noise, meet the target."""
        slow = self.alone_ms(load) * (1 + 3 * self._noise)
        return max(
            (rate for s, rate in zip(self.slowdowns, self.rates, strict=True) if s * slow <= target_ms), default=None
        )


def serve(policy, device, load, steps):
    return [device.step(policy, load) for _ in range(steps)]


loads = st.builds(
    Load, st.integers(0, 512), st.integers(0, 16384), st.integers(1, 128), st.integers(0, 2_000_000), st.floats(0, 1e6)
)
observations = st.builds(
    Observation,
    kind=st.sampled_from(Kind),
    step_ms=st.floats(-10, 1e5),
    decode_batch=st.integers(1, 512),
    context_tokens=st.integers(0, 2_000_000),
    prefill_work=st.floats(0, 16384),
    group=st.integers(1, 5),
)


@given(st.lists(observations, max_size=30), st.lists(loads, min_size=1, max_size=5), st.floats(0.1, 1e4), st.booleans())
def test_whatever_was_observed_every_decision_is_legal(seen, asked, itl_ms, paced_by_device):
    slo = policy(CAPPED, itl_ms, paced_by_device)
    for observation in seen:
        slo.observe(observation)
    for one in asked:
        decision = slo.decide(one)
        assert slo.fused_tokens(one) >= 0
        if one.decode_batch == 0:
            assert decision.group == 0
        elif one.prefill_tokens == 0:
            assert decision.group == len(CAPPED) + 1
        else:
            assert 1 <= decision.group <= len(CAPPED) and 1 <= decision.layers <= ALL_LAYERS


@settings(deadline=None)
@given(st.lists(st.floats(5, 60), min_size=2, max_size=8), st.sampled_from([CAPPED, DISJOINT]))
def test_a_tighter_target_never_gives_decode_fewer_sms(targets, shares):
    chosen = []
    for itl_ms in sorted(targets):
        slo = policy(shares, itl_ms)
        Device(shares).warm_up(slo, load())
        chosen.append(shares[slo.decide(load()).group - 1].prefill_share)
    assert chosen == sorted(chosen)


@settings(deadline=None)
@given(st.lists(st.integers(1, 256), min_size=2, max_size=8), st.floats(8, 40), st.sampled_from([CAPPED, DISJOINT]))
def test_a_larger_decode_batch_never_gives_decode_fewer_sms(batches, itl_ms, shares):
    chosen = []
    for batch in sorted(batches):
        slo = policy(shares, itl_ms)
        Device(shares).warm_up(slo, load())
        chosen.append(shares[slo.decide(load(batch, batch * 2048)).group - 1].prefill_share)
    assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize("shares", [CAPPED, DISJOINT, [*CAPPED, *DISJOINT]], ids=["capped", "disjoint", "both"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("times_alone", [1.5, 1.8, 2.2])
def test_it_finds_the_best_group_of_a_device_that_is_not_as_expected(shares, seed, times_alone):
    device = Device(shares, seed, error=0.15)
    target_ms = times_alone * device.alone_ms(load())
    slo = policy(shares, target_ms)
    device.warm_up(slo, load(), prefill=False)  # and no fused steps
    serve(slo, device, load(), 1000)
    steps = serve(slo, device, load(), 900)
    best = device.best(load(), target_ms)
    if best is None:
        return
    reached = sum(device.rates[group - 1] * ms for group, ms in steps) / sum(ms for _, ms in steps)
    assert reached >= 0.93 * best
    assert sum(ms > target_ms for _, ms in steps) <= 0.06 * len(steps)


@pytest.mark.parametrize("seed", range(5))
def test_under_a_constant_load_it_does_not_swing(seed):
    shares = [*CAPPED, *DISJOINT]
    device = Device(shares, seed, error=0.2)
    slo = policy(shares, 1.7 * device.alone_ms(load()))
    device.warm_up(slo, load(), prefill=False)
    serve(slo, device, load(), 1000)
    chosen = [group for group, _ in serve(slo, device, load(), 900)]
    assert sum(before != after for before, after in pairwise(chosen)) <= 30


@pytest.mark.parametrize(("times_alone", "fused"), [(1.4, False), (1.7, False), (5.0, True), (8.0, True)])
def test_a_loose_target_is_served_by_fused_steps_and_a_tight_one_by_the_lanes(times_alone, fused):
    shares = [*CAPPED, *DISJOINT]
    device = Device(shares)
    target_ms = times_alone * device.alone_ms(load())
    slo = policy(shares, target_ms)
    device.warm_up(slo, load())
    serve(slo, device, load(), 100)
    steps = serve(slo, device, load(), 400)
    assert (sum(what == "fused" for what, _ in steps) > 350) == fused
    assert sum(ms > target_ms for _, ms in steps) <= 0.06 * len(steps)


def test_before_anything_is_known_decode_has_the_most():
    slo = policy(CAPPED, 1000.0)
    assert slo.decide(load()).group == len(CAPPED)


def test_without_a_target_it_is_one_and_a_half_times_decode_alone():
    device = Device(CAPPED)
    free, bound = policy(CAPPED), policy(CAPPED, 1.5 * device.alone_ms(load()))
    for slo in (free, bound):
        device.warm_up(slo, load())
    assert free.decide(load()) == bound.decide(load())


def test_a_target_that_cannot_be_met_is_served_as_near_as_possible_and_said_once():
    said = []
    device = Device(CAPPED)
    slo = policy(CAPPED, 5.0, log=said)
    device.warm_up(slo, load())
    steps = serve(slo, device, load(), 50)
    assert {group for group, _ in steps} == {len(CAPPED)}
    assert slo.infeasible_decisions == 50 and slo.missed_steps == 50
    assert len(said) == 1 and said[0].startswith("itl_slo_ms is 5 but the best that is expected beside prefill is ")


def test_one_outlier_does_not_change_the_group():
    device = Device(CAPPED)
    target_ms = 1.9 * device.alone_ms(load())
    slo = policy(CAPPED, target_ms)
    device.warm_up(slo, load())
    serve(slo, device, load(), 200)
    before = slo.decide(load()).group
    for kind in (Kind.DECODE, Kind.BESIDE):
        slo.observe(Observation(kind, 5000.0, 32, 65536, 10.0, before))
    assert slo.decide(load()).group == before


def test_it_follows_a_device_that_becomes_slower():
    device = Device(CAPPED)
    target_ms = 1.9 * device.alone_ms(load())
    slo = policy(CAPPED, target_ms)
    device.warm_up(slo, load())
    serve(slo, device, load(), 300)
    device.slowdowns = [1.25 * slowdown for slowdown in device.slowdowns]
    serve(slo, device, load(), 300)
    steps = serve(slo, device, load(), 300)
    assert sum(ms > target_ms for _, ms in steps) <= 0.1 * len(steps)


class TestRecovery:
    """Whatever it was told, it comes back to the best group."""

    def settled(self, shares, seed=3):
        device = Device(shares, seed, error=0.1)
        target_ms = 1.9 * device.alone_ms(load())
        slo = policy(shares, target_ms)
        return device, target_ms, slo

    def disturbed(self, what, times, steps):
        """What of all groups was `times` as much for so many steps, and is as usual again."""
        device, target_ms, slo = self.settled(CAPPED)
        device.warm_up(slo, load(), prefill=False)
        serve(slo, device, load(), 500)
        usual = getattr(device, what)
        setattr(device, what, [times * value for value in usual])
        serve(slo, device, load(), steps)
        setattr(device, what, usual)
        return device, target_ms, slo

    def share_of_best(self, slo, device, target_ms, steps=3000):
        reached = serve(slo, device, load(), steps)[-500:]
        rate = sum(device.rates[group - 1] * ms for group, ms in reached) / sum(ms for _, ms in reached)
        return rate / device.best(load(), target_ms)

    @pytest.mark.parametrize("shares", [CAPPED, [*CAPPED, *DISJOINT]], ids=["capped", "both"])
    def test_when_no_step_was_ever_alone(self, shares):
        device, target_ms, slo = self.settled(shares)
        assert self.share_of_best(slo, device, target_ms) >= 0.85

    def test_when_the_first_steps_were_slow(self):
        device, target_ms, slo = self.settled(CAPPED)
        for times in (9.0, 3.0, 2.0, 1.0, 1.0):
            slo.observe(Observation(Kind.DECODE, times * device.alone_ms(load()), 32, 65536))
        assert self.share_of_best(slo, device, target_ms) >= 0.93

    @pytest.mark.parametrize(("steps", "times"), [(60, 1.5), (60, 3.0), (300, 2.0), (300, 3.0)])
    def test_after_a_disturbance(self, steps, times):
        device, target_ms, slo = self.disturbed("slowdowns", times, steps)
        assert self.share_of_best(slo, device, target_ms, 6000) >= 0.93

    def test_what_a_disturbance_said_of_a_group_does_not_make_another_the_safest(self):
        device, _, slo = self.disturbed("slowdowns", 3, 300)
        serve(slo, device, load(), 1000)
        assert slo._beside.slowdown(len(CAPPED)) == min(slo._beside.slowdown(group) for group in range(1, 6))

    def test_after_prompts_that_hardly_used_the_lane(self):
        device, target_ms, slo = self.disturbed("rates", 0.2, 3000)
        assert self.share_of_best(slo, device, target_ms, 4000) >= 0.93


class TestWithoutPartitions:
    """A CPU: decode and layers take turns, so that what is left of the target goes to layers."""

    RATE = 0.7  # tokens per ms

    def serve(self, itl_ms, alone_ms=30.0, tokens=1024, layers=30, steps=200):
        slo = policy(CAPPED, itl_ms, paced_by_device=False)
        asked = Load(4, tokens, layers, 400, tokens)
        slo.observe(Observation(Kind.DECODE, alone_ms, 4, 400))
        taken = []
        for _ in range(steps):
            run = min(slo.decide(asked).layers, layers)
            ms = alone_ms + tokens * run / layers / self.RATE
            slo.observe(Observation(Kind.BESIDE, ms, 4, 400, tokens * run / layers, 1))
            taken.append((run, ms))
        return taken[50:]

    @pytest.mark.parametrize("itl_ms", [100, 200, 400])
    def test_as_many_layers_as_the_target_allows(self, itl_ms):
        layer_ms = 1024 / 30 / self.RATE
        for run, ms in self.serve(itl_ms):
            assert ms <= itl_ms
            assert run >= (itl_ms / 1.3 - 30.0) // layer_ms

    def test_prefill_goes_on_when_the_target_is_below_decode_alone(self):
        assert {run for run, _ in self.serve(10)} == {1}


def test_a_learned_policy_never_fuses_without_partitions():
    slo = policy(CAPPED, 1000.0, paced_by_device=False)
    Device(CAPPED).warm_up(slo, load())
    assert slo.fused_tokens(load()) == 0


class TestOrder:
    def policy(self, ttft_ms=1000.0):
        slo = SloPolicy(CAPPED, Target(20.0, ttft_ms), DecodeAlone(WEIGHTS, KV), True, print)
        slo.observe(Observation(Kind.PREFILL, 100.0, prefill_work=1000.0))  # 10 per ms
        return slo

    @pytest.mark.parametrize(
        ("waiting", "begun", "overtakes"),
        [
            (Prompt(500, 0), Prompt(5_000, 0), False),  # 950 and 500 ms of slack
            (Prompt(500, 600), Prompt(5_000, 0), True),  # 350 and 500
            (Prompt(500, 0), Prompt(200_000, 0), True),  # the long one will be late anyway
            (Prompt(500, 2000), Prompt(200_000, 0), False),  # both will
            (Prompt(500, 2000), Prompt(500, 100), False),  # the one that waits will
        ],
    )
    def test_less_slack_goes_first_and_what_is_late_anyway_last(self, waiting, begun, overtakes):
        assert self.policy().overtakes(waiting, begun) == overtakes

    def test_without_a_target_or_knowledge_prompts_keep_their_order(self):
        assert not self.policy(None).overtakes(Prompt(1, 0), Prompt(1e6, 0))
        assert not policy(CAPPED, 20.0).overtakes(Prompt(1, 0), Prompt(1e6, 0))

    def test_other_policies_keep_the_order_of_arrival(self):
        assert not FixedPolicy(1, 1, LayerRule()).overtakes(Prompt(1, 0), Prompt(1e6, 0))


class TestStarvation:
    """A prompt that has waited for too long lets ITL grow, up to its limit."""

    def slo(self, itl_limit_ms):
        device = Device(CAPPED, noise=0.0)
        target = Target(1.35 * device.alone_ms(load()), None, 2_000.0, itl_limit_ms)
        slo = SloPolicy(CAPPED, target, DecodeAlone(WEIGHTS, KV), True, print)
        device.warm_up(slo, load(), prefill=False)
        serve(slo, device, load(), 100)
        return slo, device

    def waiting(self, wait_ms):
        return replace(load(), oldest_wait_ms=wait_ms)

    def groups(self, slo, device, wait_ms):
        steps = serve(slo, device, self.waiting(wait_ms), 400)  # it tries what it does not know
        return {group for group, _ in steps[-50:]}

    def test_before_the_limit_only_the_target_counts(self):
        slo, device = self.slo(None)
        assert self.groups(slo, device, 2_000.0) == {5}

    def test_after_it_prefill_gets_the_fastest_group_and_then_the_target_counts_again(self):
        slo, device = self.slo(None)
        assert self.groups(slo, device, 2_001.0) == {1}
        assert self.groups(slo, device, 0.0) == {5}

    def test_the_limit_of_itl_holds_even_then(self):
        alone_ms = Device(CAPPED).alone_ms(load())
        slo, device = self.slo(1.95 * alone_ms)
        (group,) = self.groups(slo, device, 60_000.0)
        assert 1 < group < 5 and device.slowdowns[group - 1] <= 1.95

    def test_a_load_that_starves_is_not_counted_as_a_target_out_of_reach(self):
        slo, device = self.slo(1.4 * Device(CAPPED).alone_ms(load()))
        before = slo.infeasible_decisions
        self.groups(slo, device, 60_000.0)
        assert slo.infeasible_decisions == before


def test_where_prefill_was_never_alone_its_rate_follows_from_the_groups():
    device = Device(CAPPED, noise=0.0)
    slo = policy(CAPPED, 4 * device.alone_ms(load()))
    device.warm_up(slo, load(), prefill=False)
    assert slo.fused_tokens(load()) == 0, "no rate is known"
    serve(slo, device, load(), 100)
    expected = (4 / FIRST_TAIL - 1) * device.alone_ms(load()) * device.FULL_RATE
    assert slo.fused_tokens(load()) == pytest.approx(expected, rel=0.05)


class TestFusedSteps:
    ALONE_MS, RATE = 10.0, 40.0

    def tokens(self, fused, target_ms=40.0):
        return fused.work(target_ms / fused.tail.factor, self.ALONE_MS, ALL_FIXED, self.RATE)

    def step(self, fused, work, times=1.0):
        fused.learn(
            times * max(1.5 * self.ALONE_MS, self.ALONE_MS + work / self.RATE),
            work,
            self.ALONE_MS,
            ALL_FIXED,
            self.RATE,
        )

    def test_the_short_last_chunks_of_prompts_do_not_make_the_others_longer(self):
        fused = FusedSteps()
        for _ in range(200):
            fused.learn(1.1 * self.ALONE_MS, 20.0, self.ALONE_MS, ALL_FIXED, self.RATE)
        assert self.tokens(fused) == self.tokens(FusedSteps())

    def test_where_short_chunks_take_longer_than_the_target_none_fits(self):
        fused = FusedSteps()
        for _ in range(200):
            fused.learn(3.8 * self.ALONE_MS, 20.0, self.ALONE_MS, ALL_FIXED, self.RATE)
        assert self.tokens(fused) == 0.0

    @pytest.mark.parametrize(("target_ms", "slow"), [(20.0, 3.0), (20.0, 2.0), (18.0, 1.3)])
    def test_a_first_step_that_was_slow_is_forgotten(self, target_ms, slow):
        """It makes chunks so short that they say nothing of long ones, or none at all."""
        fused = FusedSteps()
        work = self.tokens(fused, target_ms)
        self.step(fused, work, slow)
        for _ in range(600):
            if work := self.tokens(fused, target_ms):
                self.step(fused, work)
        assert self.tokens(fused, target_ms) >= 0.95 * self.tokens(FusedSteps(), target_ms)

    def test_short_prompts_with_a_hiccup_now_and_then_do_not_turn_fused_steps_off(self):
        fused, generator = FusedSteps(), random.Random(5)
        for _ in range(5000):
            times = 2.5 if generator.random() < 0.02 else 1.1
            fused.learn(times * self.ALONE_MS, 64.0, self.ALONE_MS, ALL_FIXED, self.RATE)
        assert self.tokens(fused, 20.0) >= 0.9 * self.tokens(FusedSteps(), 20.0)

    @pytest.mark.parametrize("times", [0.8, 1.0, 1.3])
    def test_they_grow_until_they_take_what_the_target_allows(self, times):
        fused, generator, seen = FusedSteps(), random.Random(3), []
        for _ in range(1500):
            work = self.tokens(fused)
            seen.append(times * generator.uniform(0.9, 1.1) * (self.ALONE_MS + work / self.RATE))
            fused.learn(seen[-1], work, self.ALONE_MS, ALL_FIXED, self.RATE)
        late = sorted(seen[500:])
        assert sum(ms > 40.0 for ms in late) <= 0.05 * len(late)
        assert late[len(late) // 2] > 33.0

    def test_what_was_calibrated_counts_by_the_parts_of_the_decode_step(self):
        fused, mix = FusedSteps(FusedPrior((0.5, 1.2, 1.1), 0.9)), Mix(0.4, 0.2, 0.4)
        base_ms = (0.4 * 0.5 + 0.2 * 1.2 + 0.4 * 1.1) * self.ALONE_MS
        work = fused.work(30.0, self.ALONE_MS, mix, self.RATE)
        assert work == pytest.approx((30.0 - base_ms) / 0.9 * self.RATE)
        assert fused.ms(work, self.ALONE_MS, mix, self.RATE) == pytest.approx(30.0)
        assert fused.ms(1.0, self.ALONE_MS, mix, self.RATE) == self.ALONE_MS  # never less than decode alone

    def test_none_fits_below_the_floor(self):
        assert FusedSteps().work(1.2 * self.ALONE_MS, self.ALONE_MS, ALL_FIXED, self.RATE) == 0.0


def first_fused_ms(slo, **of_load):
    """The lowest target, in ms, that is served by fused steps."""
    for target_ms in (0.1 * tenth for tenth in range(100, 2000)):
        slo._target = Target(itl_ms=target_ms)
        if slo.fused_tokens(load(**of_load)):
            return target_ms
    raise AssertionError("never fused")


@pytest.fixture
def knowing():
    """A policy that knows all of a device."""
    device = Device(CAPPED, noise=0.05)
    slo = policy(CAPPED, 60.0)
    device.warm_up(slo, load())
    serve(slo, device, load(), 300)
    return slo


def test_what_is_in_use_stays_where_fused_steps_and_the_lanes_are_as_good(knowing):
    """A change costs the time in which the lane runs empty."""
    busy, empty = (first_fused_ms(knowing, is_lane_busy=is_busy) for is_busy in (True, False))
    assert 1.02 < busy / empty < 1.3


def test_a_few_prompts_are_not_worth_beginning_with_the_lane(knowing):
    """It would take as long to begin as they do."""
    few, many = (first_fused_ms(knowing, waiting_work=work) for work in (300.0, 1e6))
    assert few < 0.9 * many
    knowing._target = Target(itl_ms=many)
    assert not knowing.fused_tokens(load(waiting_work=300.0, is_lane_busy=True))  # nor leaving it


def test_a_step_that_hardly_has_no_graph_is_cut_to_one_that_has(knowing):
    """One without takes as long as one of twice the tokens."""
    knowing._target = Target(itl_ms=90.0)
    tokens = knowing.fused_tokens(load()) + 32  # with those that decode
    for graph_tokens, expected in (
        (tokens, tokens),
        (tokens - 1, tokens - 1),
        (tokens // 2 + 1, tokens // 2 + 1),
        (tokens // 2, tokens),  # so much more that it pays
        (0, tokens),
    ):
        knowing._fused.graph_tokens = graph_tokens
        assert knowing.fused_tokens(load()) + 32 == expected


def test_prefill_is_slower_beside_longer_decode_steps_but_never_stands_still():
    prior = GroupPrior((1.5, 1.5, 1.5), (20.0, 3.0))
    rates = [prior.rate(Mix(fixed, 0.0, 1 - fixed)) for fixed in (1.0, 0.5, 0.25, 0.1, 0.0)]
    assert rates == pytest.approx([20.0, 17.0, 11.0, 5.0, 5.0])


def test_nothing_is_fused_where_nothing_waits(knowing):
    knowing._target = Target(itl_ms=1000.0)
    assert knowing.fused_tokens(load(waiting_work=0.0)) == 0 < knowing.fused_tokens(load())


def test_fused_steps_that_take_longer_than_expected_shrink_where_prefill_was_never_alone():
    slo = policy(CAPPED, 60.0)
    for _ in range(60):
        slo.observe(Observation(Kind.DECODE, 10.0, 32, 65536))
    for _ in range(200):
        slo.observe(Observation(Kind.BESIDE, 18.0, 32, 65536, 180.0, slo.decide(load()).group))
    first = tokens = slo.fused_tokens(load())
    for _ in range(100):
        tokens = slo.fused_tokens(load())
        slo.observe(Observation(Kind.FUSED, 200.0, 32, 65536, float(max(tokens, 1))))
    assert 0 <= tokens < first / 2


def impatient(noise=0.3, itl_ms=20.0):
    """A policy with a target for TTFT of 1 s that knows a device with slow steps, and the device."""
    device = Device(CAPPED, noise=noise)
    slo = SloPolicy(CAPPED, Target(itl_ms, 1000.0), DecodeAlone(WEIGHTS, KV), True, lambda text: None)
    device.warm_up(slo, load(), prefill=False)
    serve(slo, device, load(waiting_work=0.0), 1500)
    return slo, device


def test_while_a_first_token_may_be_late_the_target_is_kept_by_the_usual_step():
    """Slow steps may then take longer, and prefill goes faster: a late first token is as bad as a late other one."""
    slo, device = impatient()
    rate = lambda steps: device.rates[steps[-1][0] - 1]  # noqa: E731
    in_time = serve(slo, device, load(waiting_work=5000.0), 300)
    late = serve(slo, device, load(first_tokens=((5000.0, 800.0),)), 300)
    assert rate(late) > rate(in_time)
    assert sorted(ms for _, ms in late[100:])[100] <= 20.0 < max(ms for _, ms in late[100:])


def test_prefill_is_as_fast_as_first_tokens_need_and_no_faster():
    """With these slow steps the last two groups keep the target in nearly all steps, and all of them in usual ones."""
    slo, device = impatient()
    for needed, groups in ((5.0, {3, 4}), (13.5, {3}), (17.0, {2}), (1000.0, {1})):
        steps = serve(slo, device, load(waiting_work=needed * 1000.0 * TTFT_PLANNED), 300)
        assert {group for group, _ in steps[200:]} <= groups


def test_before_a_group_was_used_its_rate_is_taken_from_a_prompt_alone():
    """A little work needs no more than the groups whose slow steps keep the target too, and much work the fastest."""
    device = Device(CAPPED)
    slo = SloPolicy(CAPPED, Target(13.0, 1000.0), DecodeAlone(WEIGHTS, KV), True, lambda text: None)
    device.warm_up(slo, load())
    assert not slo._beside.knows_a_rate
    chosen = [
        slo._choose(load(waiting_work=work), device.alone_ms(load()), 13.0, slo._mix_of(load())).group
        for work in (750.0, 1e6)
    ]
    assert chosen[0] > chosen[1]


def test_a_need_that_changes_a_little_changes_no_group():
    """From one that is fast enough half of the time and safe, to one that is always fast enough and is not: once."""
    slo, device = impatient(noise=0.1, itl_ms=15.0)
    needs = [device.rates[2] * (0.97 + 0.06 * (step % 9 > 4)) * 1000.0 * TTFT_PLANNED for step in range(400)]
    groups = [device.step(slo, load(waiting_work=work))[0] for work in needs][100:]
    assert {2} <= set(groups) <= {2, 3} and sum(a != b for a, b in pairwise(groups)) <= 4


def test_the_rate_that_is_needed_is_of_the_prompt_with_the_least_time():
    planned_ms = 1000.0 * TTFT_PLANNED
    needed = lambda *first_tokens: needed_rate(load(first_tokens=first_tokens), 1000.0)  # noqa: E731
    assert needed_rate(load(), None) == needed() == needed((0.0, 1e6)) == 0.0
    queue = [(2000.0, 100.0), (5000.0, planned_ms - 300.0), (6000.0, 0.0)]
    assert needed(*queue) == pytest.approx(5000.0 / 300.0), "the one in the middle"
    assert needed((2000.0, planned_ms - 100.0), *queue[1:]) == pytest.approx(2000.0 / 100.0)
    assert needed(*queue, (7000.0, planned_ms)) == math.inf


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 3000)), max_size=20), st.floats(0, 1e5))
def test_another_prompt_never_lowers_the_rate_that_is_needed(prompts, more):
    """The case in which a short prompt that has just come made the others' waits count for nothing."""
    queue, work = [], 0.0
    for own, wait_ms in prompts:
        work += own
        queue.append((work, wait_ms))
    before = needed_rate(load(first_tokens=tuple(queue)), 1000.0)
    assert needed_rate(load(first_tokens=(*queue, (work + more, 0.0))), 1000.0) >= before


def test_the_limit_of_itl_is_never_below_the_target():
    free = Target(itl_limit_ms=20.0)
    assert free.of(30.0) == free.of(30.0, 60_000.0) == 45.0
