# SPDX-License-Identifier: Apache-2.0
"""What a policy believes of step times: a prior, corrected by every step that has run.

A decode step beside prefill takes a *slowdown* times what it takes alone on the whole device. Measured on an H200 with
an 8B model over four loads (benchmarks/results/frontier-h200-*.json), the slowdown of a group is nearly the same for
all of them (within a tenth of its mean for `capped`, a seventh for `disjoint`), so it is learned as one number for each
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_pdmux.policy.prior import ALL_FIXED, GroupPrior, Mix

# A correction forgets half of what it knew in so many steps; one step moves it by no more than STEP_LIMIT. What is
# peculiar to a group is forgotten slowly, what all groups have in common at a time quickly.
HALF_LIFE_STEPS = 20
SLOW_HALF_LIFE_STEPS = 150
STEP_LIMIT = 1.5
# A group's first steps, which may be slow for other reasons, do not outweigh the prior at once.
PRIOR_STEPS = 2
# What was calibrated of steps that are alone counts as so many steps, or so much time.
CALIBRATED_STEPS = 5
CALIBRATED_MS = 500.0
# What was calibrated of a group counts as so many of its steps: a few slow ones must not have it left, since it is its
# own steps alone that correct what is believed of it.
CALIBRATED_GROUP_STEPS = 10
# What was never seen is hoped to be this much better than the prior, which was off by 16 % at most where it was
# measured; what has not been seen for so many steps beside prefill, a little better. Else a group would be left out for
# ever by a belief that is wrong.
HOPE_UNSEEN = 0.8
HOPE_OLD = 0.93
STEPS_UNTIL_OLD = 1000
FIRST_SAMPLES = 5
# A prior is not trusted beyond this, nor is what was learned: a fault of the clock must not shut a lane out.
SLOWDOWN_LIMITS = (1.0, 20.0)


@dataclass
class Average:
    """A moving average of positive values in which single outliers count for little."""

    value: float
    weight: float = 0.0  # steps that it rests on, up to what is remembered; that of a prior is how much it is trusted
    is_seen: bool = False  # whether any sample has come
    half_life_steps: float = HALF_LIFE_STEPS

    def add(self, sample: float) -> None:
        """Move towards `sample`: fast at first, slowly later, and never far at once."""
        if self.is_seen:
            sample = min(max(sample, self.value / STEP_LIMIT), self.value * STEP_LIMIT)
        self.is_seen = True
        self.weight = min(self.weight + 1, self.half_life_steps * 1.44)
        self.value += (sample - self.value) / self.weight


@dataclass
class Rate:
    """Prefill work per ms over the last steps. Sums, since the work of single steps comes in bursts."""

    work: float = 0.0
    ms: float = 0.0
    half_life_steps: float = HALF_LIFE_STEPS

    @classmethod
    def calibrated(cls, rate: float) -> Rate:
        """One that is known from the beginning."""
        return cls(rate * CALIBRATED_MS, CALIBRATED_MS)

    def add(self, work: float, ms: float) -> None:
        """A step of `ms` in which `work` went through."""
        keep = 0.5 ** (1 / self.half_life_steps)
        self.work, self.ms = self.work * keep + work, self.ms * keep + ms

    @property
    def value(self) -> float | None:
        """None before any work worth the name has been seen."""
        return self.work / self.ms if self.work > 1e-3 and self.ms > 1e-3 else None


class DecodeAlone:
    """Time of a decode step that has the device to itself, in ms.

    It grows with what is read from memory: the weights, once, and the KV of every token of context (the linear form of
    MuxWise: a * context + b * batch + c). The ratio of the three is the model's; their scale is learned.
    """

    # A step reads the weights and pays a fixed cost for launch, sampling and the like; H200, 8B: 1.4 ms beside 3.3 ms.
    FIXED_SHARE = 0.4
    TOKENS_PER_REQUEST = 450  # one more request costs as much as so many tokens of context; H200, 8B: 0.0127 ms

    def __init__(self, weight_bytes: float, kv_bytes_per_token: float):
        self._fixed = weight_bytes * (1 + self.FIXED_SHARE)
        self._per_request = kv_bytes_per_token * self.TOKENS_PER_REQUEST
        self._per_token = kv_bytes_per_token
        self._scale: Average | None = None
        self._samples = 0

    @classmethod
    def calibrated(cls, decode_ms: tuple[float, float, float]) -> DecodeAlone:
        """Of a device whose three parts were measured; what is learned is by how much they are off now."""
        alone = cls(0.0, 0.0)
        alone._fixed, alone._per_request, alone._per_token = decode_ms
        alone._scale = Average(1.0, CALIBRATED_STEPS, is_seen=True)
        alone._samples = FIRST_SAMPLES
        return alone

    @property
    def is_known(self) -> bool:
        """Whether any step has been seen."""
        return self._scale is not None

    def add(self, decode_batch: int, context_tokens: int, step_ms: float) -> None:
        """Learn from a decode step with nothing beside it. Of the first ones, which warm up, the fastest counts."""
        sample = step_ms / self._size(decode_batch, context_tokens)
        if self._scale is None:
            self._scale = Average(sample)
        self._samples += 1
        if self._samples <= FIRST_SAMPLES:
            self._scale.value = min(self._scale.value, sample)
        else:
            self._scale.add(sample)

    def bound(self, decode_batch: int, context_tokens: int, step_ms: float, slowdown: float) -> None:
        """Learn from a step with prefill beside it, which is believed to slow it down: alone it takes no longer.

        Where no step has ever been alone this is all there is to begin with.
        """
        if self._scale is None:
            self.add(decode_batch, context_tokens, step_ms / slowdown)
        elif step_ms < self.ms(decode_batch, context_tokens):
            self.add(decode_batch, context_tokens, step_ms)

    def ms(self, decode_batch: int, context_tokens: int) -> float:
        """The expected time; 0 before any step has been seen."""
        return 0.0 if self._scale is None else self._scale.value * self._size(decode_batch, context_tokens)

    def mix(self, decode_batch: int, context_tokens: int) -> Mix:
        """What a step consists of."""
        size = self._size(decode_batch, context_tokens)
        return Mix(self._fixed / size, self._per_request * decode_batch / size, self._per_token * context_tokens / size)

    def _size(self, decode_batch: int, context_tokens: int) -> float:
        return self._fixed + self._per_request * decode_batch + self._per_token * context_tokens


@dataclass(frozen=True)
class Share:
    """What a group gives the lanes: how they share the device, and prefill's part of its SMs."""

    is_disjoint: bool
    prefill_share: float  # of the device's SMs, 0 to 1


class Belief(NamedTuple):
    """Of a group. `hope`: by what to multiply the slowdown, and divide the rate, when it is a question of trying it."""

    slowdown: float  # of a decode step, over what it takes alone
    rate: float  # prefill work per ms; relative to the other groups while none is known
    hope: float


class Beside:
    """For each group: how much slower a decode step is than alone, and prefill work per ms.

    Each is a prior, times what is peculiar to the group (learned slowly, and kept while other groups are in use), times
    what all groups have in common at present (learned quickly): a disturbance, or other prompts. The prior is what was
    calibrated, by the mix of the decode step, or else one number for each group.
    """

    def __init__(self, shares: Iterable[Share], calibrated: Sequence[GroupPrior] = ()):
        self._shares = tuple(shares)
        self._is_calibrated = bool(calibrated)
        self._priors = tuple(calibrated) or tuple(map(_prior, self._shares))
        if len(self._priors) != len(self._shares):
            raise ValueError(f"{len(self._priors)} priors for {len(self._shares)} groups")
        slow = SLOW_HALF_LIFE_STEPS
        trusted = CALIBRATED_GROUP_STEPS if self._is_calibrated else PRIOR_STEPS
        self._slower = [Average(1.0, trusted, half_life_steps=slow) for _ in self._shares]
        self._slower_now = Average(1.0, PRIOR_STEPS)
        self._faster = [Rate(half_life_steps=slow) for _ in self._shares]  # over the prior
        self._faster_now = Rate()  # over the prior and what is peculiar
        # Of each kind, the groups from the most SMs for prefill to the fewest.
        order = sorted(range(len(self._shares)), key=lambda place: -self._shares[place].prefill_share)
        self._falling = [
            [place for place in order if self._shares[place].is_disjoint == kind] for kind in (False, True)
        ]
        self._steps = 0
        self._seen_at = [0 for _ in self._shares]

    def add_decode(self, group: int, slowdown: float, mix: Mix = ALL_FIXED) -> None:
        """Learn from a step of mixed group `group`, 1 to the number of shares."""
        self._steps += 1
        self._seen_at[group - 1] = self._steps
        low, high = SLOWDOWN_LIMITS
        times = min(max(slowdown, low), high) / self._priors[group - 1].slowdown(mix)
        self._slower[group - 1].add(times)
        self._slower_now.add(times / self._slower[group - 1].value)

    def add_prefill(self, group: int, work: float, ms: float, mix: Mix = ALL_FIXED) -> None:
        """Learn the pace of the prefill lane in `group`."""
        over_prior = work / self._priors[group - 1].rate(mix)
        faster = self._faster[group - 1]
        faster.add(over_prior, ms)
        if faster.value is not None:
            self._faster_now.add(over_prior / faster.value, ms)

    def beliefs(self, mix: Mix = ALL_FIXED) -> list[Belief]:
        """Of all groups, in order, beside a decode step of this mix."""
        seen = [rate.value for rate in self._faster if rate.value is not None]
        usual = sum(seen) / len(seen) if seen else 1.0
        faster_now, slower_now = self._faster_now.value or 1.0, self._slower_now.value
        slowdowns = [
            max(1.0, prior.slowdown(mix) * slower.value * slower_now)
            for prior, slower in zip(self._priors, self._slower, strict=True)
        ]
        for falling in self._falling:
            lowest = SLOWDOWN_LIMITS[1]
            for place in falling:  # with fewer SMs for prefill decode is not slower
                lowest = slowdowns[place] = min(slowdowns[place], lowest)
        return [
            Belief(
                slowdowns[place],
                self._priors[place].rate(mix) * (faster.value or usual) * faster_now,
                self._hope(place),
            )
            for place, faster in enumerate(self._faster)
        ]

    def slowdown(self, group: int, mix: Mix = ALL_FIXED) -> float:
        """Of a decode step of this mix in `group`."""
        return self.beliefs(mix)[group - 1].slowdown

    @property
    def knows_a_rate(self) -> bool:
        """Whether rates are in work per ms, or only relative."""
        return self._is_calibrated or any(rate.value is not None for rate in self._faster)

    @property
    def full_rate(self) -> float | None:
        """Of prefill on the whole device, as far as the rates of groups tell; None while none is known."""
        seen = [rate.value for rate in self._faster if rate.value is not None]
        if self._is_calibrated or not seen:  # what is calibrated is no part of the whole device's
            return None
        return sum(seen) / len(seen) * (self._faster_now.value or 1.0)

    def _hope(self, place: int) -> float:
        if not self._slower[place].is_seen and not self._is_calibrated:
            return HOPE_UNSEEN
        return HOPE_OLD if self._steps - self._seen_at[place] >= STEPS_UNTIL_OLD else 1.0


def _prior(share: Share) -> GroupPrior:
    """Without a calibration, whatever the mix. Rates are relative to that of the whole device."""
    slowdown, rate = _slowdown(share), _rate(share)
    return GroupPrior((slowdown, slowdown, slowdown), (rate, 0.0))


def _slowdown(share: Share) -> float:
    """The prior: fits to the four loads on an H200 with 8B that are named above."""
    if share.is_disjoint:
        power: float = max(1 - share.prefill_share, 0.05) ** -0.75
        return max(1.05, 0.95 * power)
    return max(1.1, 1.41 + 1.81 * (share.prefill_share - 0.515))


def _rate(share: Share) -> float:
    """The prior of prefill throughput, as a part of that of the whole device; from the same runs."""
    return (0.86 if share.is_disjoint else 0.65) * share.prefill_share
