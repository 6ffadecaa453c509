# SPDX-License-Identifier: Apache-2.0
"""What a policy may know of a device before it has served anything: plain numbers, from wherever they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_FIXED = 1e-9  # a share that is divided by


class Mix(NamedTuple):
    """What a decode step's time alone consists of: shares, 0 to 1, which sum to 1."""

    fixed: float  # whatever its size: weights, launch
    requests: float
    context: float

    @property
    def added(self) -> float:
        """How long the step is beyond its fixed part, in times of it."""
        return 1 / max(self.fixed, LEAST_FIXED) - 1


ALL_FIXED = Mix(1.0, 0.0, 0.0)


# Beyond what was calibrated a rate is not believed to fall further than to this part of what it is beside the shortest
# steps.
LEAST_RATE = 0.25


def mean_of(mix: Mix, parts: Sequence[float]) -> float:
    """What the parts of a decode step are multiplied by, for the whole of it."""
    return sum(share * part for share, part in zip(mix, parts, strict=True))


@dataclass(frozen=True)
class GroupPrior:
    """Of a mixed group. A load's slowdown is the mean of three, by its mix. Prefill's rate falls with the length of the
    decode steps beside it: in a longer one decode's kernels hold SMs and memory for longer."""

    slowdowns: tuple[float, float, float]  # of a decode step's fixed part, its requests' and its context's
    rate_line: tuple[float, float]  # work per ms beside steps that are all fixed part, and less for each such part more

    def slowdown(self, mix: Mix) -> float:
        """Of a decode step of this mix, over what it takes alone."""
        return mean_of(mix, self.slowdowns)

    def rate(self, mix: Mix) -> float:
        """Of prefill beside decode steps of this mix."""
        first, less = self.rate_line
        return max(first - less * mix.added, LEAST_RATE * first)


@dataclass(frozen=True)
class FusedPrior:
    """Of fused steps: what they take for the parts of a decode step, and for their prompt tokens, over what these take
    alone. One batch reads the weights for both, so that the fixed part may be below 1."""

    parts: tuple[float, float, float]  # a decode step's fixed part, its requests' and its context's
    prompt: float

    def ms(self, alone_ms: float, mix: Mix, prompt_ms: float) -> float:
        """A step with these, alone `alone_ms` and `prompt_ms`."""
        return mean_of(mix, self.parts) * alone_ms + self.prompt * prompt_ms


@dataclass(frozen=True)
class Prior:
    """A calibration, as far as a policy uses it. Work is that of the `PromptWork` that the policy is given with it."""

    decode_ms: tuple[float, float, float]  # of a step alone: fixed, for each request, for each token of context
    full_rate: float  # prefill work per ms on the whole device
    groups: tuple[GroupPrior, ...] = ()  # the mixed ones, in order; none where groups were not calibrated
    fused: FusedPrior | None = None
