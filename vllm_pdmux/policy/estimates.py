# SPDX-License-Identifier: Apache-2.0
"""What a policy believes of step times: a prior, corrected by every step that has run.

A decode step beside prefill takes a *slowdown* times what it takes alone on the whole device. Measured on an H200 with
an 8B model over four loads (benchmarks/results/frontier-h200-*.json), the slowdown of a group is nearly the same for
all of them (within a tenth of its mean for `capped`, a seventh for `disjoint`), so it is learned as one number for each
group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# A correction forgets half of what it knew in so many steps; one step moves it by no more than STEP_LIMIT.
HALF_LIFE_STEPS = 20
STEP_LIMIT = 1.5
# A group's first steps, which may be slow for other reasons, do not outweigh the prior at once.
PRIOR_STEPS = 2
# What was never seen is hoped to be this much better than the prior, which was off by 16 % at most where it was
# measured; what has not been seen for so many steps beside prefill, a little better. Else a group would be left out for
# ever by a belief that is wrong or old.
HOPE_UNSEEN = 0.8
HOPE_OLD = 0.93
STEPS_UNTIL_OLD = 1000
# A prior is not trusted beyond this, nor is what was learned: a fault of the clock must not shut a lane out.
SLOWDOWN_LIMITS = (1.0, 20.0)


@dataclass
class Average:
    """A moving average of positive values in which single outliers count for little."""

    value: float
    weight: float = 0.0  # steps that it rests on, up to what is remembered; that of a prior is how much it is trusted
    is_seen: bool = False  # whether any sample has come

    def add(self, sample: float) -> None:
        """Move towards `sample`: fast at first, slowly later, and never far at once."""
        if self.is_seen:
            sample = min(max(sample, self.value / STEP_LIMIT), self.value * STEP_LIMIT)
        self.is_seen = True
        self.weight = min(self.weight + 1, HALF_LIFE_STEPS * 1.44)
        self.value += (sample - self.value) / self.weight


@dataclass
class Rate:
    """Prefill work per ms over the last steps. Sums, since the work of single steps comes in bursts."""

    work: float = 0.0
    ms: float = 0.0

    def add(self, work: float, ms: float) -> None:
        """A step of `ms` in which `work` went through."""
        keep = 0.5 ** (1 / HALF_LIFE_STEPS)
        self.work, self.ms = self.work * keep + work, self.ms * keep + ms

    @property
    def value(self) -> float | None:
        """None before any work has been seen."""
        return self.work / self.ms if self.work > 0 and self.ms > 0 else None


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
        self._per_token = kv_bytes_per_token
        self._scale: Average | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step has been seen."""
        return self._scale is not None

    def add(self, decode_batch: int, context_tokens: int, step_ms: float) -> None:
        """Learn from a decode step with nothing beside it."""
        sample = step_ms / self._size(decode_batch, context_tokens)
        if self._scale is None:
            self._scale = Average(sample)
        self._scale.add(sample)

    def ms(self, decode_batch: int, context_tokens: int) -> float:
        """The expected time; 0 before any step has been seen."""
        return 0.0 if self._scale is None else self._scale.value * self._size(decode_batch, context_tokens)

    def _size(self, decode_batch: int, context_tokens: int) -> float:
        return self._fixed + self._per_token * (context_tokens + self.TOKENS_PER_REQUEST * decode_batch)


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
    """For each group: how much slower a decode step is than alone, and prefill work per ms."""

    def __init__(self, shares: Iterable[Share]):
        self._shares = tuple(shares)
        self._prior_slowdowns = [_slowdown(share) for share in self._shares]
        self._prior_rates = [_rate(share) for share in self._shares]
        self._slowdowns = [Average(prior, PRIOR_STEPS) for prior in self._prior_slowdowns]
        self._rates = [Rate() for _ in self._shares]
        self._steps = 0
        self._seen_at = [0 for _ in self._shares]

    def add_decode(self, group: int, slowdown: float) -> None:
        """Learn from a step of mixed group `group`, 1 to the number of shares."""
        self._steps += 1
        self._seen_at[group - 1] = self._steps
        low, high = SLOWDOWN_LIMITS
        self._slowdowns[group - 1].add(min(max(slowdown, low), high))

    def add_prefill(self, group: int, work: float, ms: float) -> None:
        """Learn the pace of the prefill lane in `group`."""
        self._rates[group - 1].add(work, ms)

    def beliefs(self) -> list[Belief]:
        """Of all groups, in order. What is not known of one moves with what is known of the others."""
        known = [
            (one.value - 1) / (prior - 1)
            for one, prior in zip(self._slowdowns, self._prior_slowdowns, strict=True)
            if one.is_seen
        ]
        slower = sum(known) / len(known) if known else 1.0
        rates = [rate.value for rate in self._rates]
        seen = [rate / prior for rate, prior in zip(rates, self._prior_rates, strict=True) if rate is not None]
        faster = sum(seen) / len(seen) if seen else 1.0
        return [
            Belief(
                slowdown=one.value if one.is_seen else 1 + (one.value - 1) * slower,
                rate=rate if rate is not None else prior * faster,
                hope=self._hope(one, seen_at),
            )
            for one, rate, prior, seen_at in zip(self._slowdowns, rates, self._prior_rates, self._seen_at, strict=True)
        ]

    def slowdown(self, group: int) -> float:
        """Of a decode step in `group`."""
        return self.beliefs()[group - 1].slowdown

    @property
    def knows_a_rate(self) -> bool:
        """Whether rates are in work per ms, or only relative."""
        return any(rate.value is not None for rate in self._rates)

    def _hope(self, slowdown: Average, seen_at: int) -> float:
        if not slowdown.is_seen:
            return HOPE_UNSEEN
        return HOPE_OLD if self._steps - seen_at >= STEPS_UNTIL_OLD else 1.0


def _slowdown(share: Share) -> float:
    """The prior: fits to the four loads on an H200 with 8B that are named above."""
    if share.is_disjoint:
        return max(1.05, 0.95 * max(1 - share.prefill_share, 0.05) ** -0.75)
    return max(1.1, 1.41 + 1.81 * (share.prefill_share - 0.515))


def _rate(share: Share) -> float:
    """The prior of prefill throughput, as a part of that of the whole device; from the same runs."""
    return (0.86 if share.is_disjoint else 0.65) * share.prefill_share
