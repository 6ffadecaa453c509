# SPDX-License-Identifier: Apache-2.0
"""What a policy may know of a device before it has served anything: plain numbers, from wherever they were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Mix(NamedTuple):
    """What a decode step's time alone consists of: shares, 0 to 1, which sum to 1."""

    fixed: float  # whatever its size: weights, launch
    requests: float
    context: float


ALL_FIXED = Mix(1.0, 0.0, 0.0)


@dataclass(frozen=True)
class GroupPrior:
    """Of a mixed group. A load's slowdown is the mean of three, by its mix; its rate that of two, likewise."""

    slowdowns: tuple[float, float, float]  # of a decode step's fixed part, its requests' and its context's
    rates: tuple[float, float]  # prefill work per ms beside steps that are all fixed part, and that have none

    def slowdown(self, mix: Mix) -> float:
        """Of a decode step of this mix, over what it takes alone."""
        return sum(share * slowdown for share, slowdown in zip(mix, self.slowdowns, strict=True))

    def rate(self, mix: Mix) -> float:
        """Of prefill beside decode steps of this mix."""
        return self.rates[0] * mix.fixed + self.rates[1] * (1 - mix.fixed)


@dataclass(frozen=True)
class Prior:
    """A calibration, as far as a policy uses it. Work is that of the `PromptWork` that the policy is given with it."""

    decode_ms: tuple[float, float, float]  # of a step alone: fixed, for each request, for each token of context
    full_rate: float  # prefill work per ms on the whole device
    groups: tuple[GroupPrior, ...] = ()  # the mixed ones, in order; none where groups were not calibrated
    fused_floor: float | None = None  # a fused step takes at least so many times decode alone
    fused_decode: float | None = None  # and so many times it, besides the time of its prompt tokens
