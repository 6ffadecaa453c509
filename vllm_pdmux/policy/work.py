# SPDX-License-Identifier: Apache-2.0
"""The work of prefilling: a token costs more the more tokens it attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptWork:
    """Counts in tokens of a prompt's beginning; MuxWise's quadratic form, c * new + a * new * (computed + new / 2).

    `doubling_tokens`: at so many tokens before it a token costs twice what the first one does, c / a. It follows from
    the shape of a model: operations of its weights for one token over those of attention for one pair.
    """

    doubling_tokens: float = math.inf

    def of(self, tokens: int, computed_tokens: int = 0) -> float:
        """The work of `tokens` new tokens of a prompt of which `computed_tokens` are computed."""
        return tokens * (1 + (computed_tokens + tokens / 2) / self.doubling_tokens)

    def tokens(self, work: float, computed_tokens: int) -> int:
        """How many new tokens `work` is enough for; the inverse of `of`."""
        if math.isinf(self.doubling_tokens):
            return int(work)
        first = 1 + computed_tokens / self.doubling_tokens
        # The positive root of n * n / (2 * doubling_tokens) + n * first = work
        return int(self.doubling_tokens * (math.sqrt(first * first + 2 * work / self.doubling_tokens) - first))
