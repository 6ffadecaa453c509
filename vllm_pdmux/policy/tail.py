# SPDX-License-Identifier: Apache-2.0
"""How much longer than usual the slow steps take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

# The share of steps that may be slower than a target, of so many last steps; and the bounds of the factor for it.
TAIL_SHARE, TAIL_STEPS = 0.02, 250
TAIL_LIMITS = (1.02, 2.0)
FIRST_TAIL = 1.15


class Tail:
    """The factor over the expected time that all but TAIL_SHARE of the last TAIL_STEPS steps kept.

    It begins with steps that give FIRST_TAIL, and forgets them one by one. A burst of slow steps is forgotten when so
    many others have come, however slow it was.
    """

    def __init__(self) -> None:
        self._allowed = round(TAIL_STEPS * TAIL_SHARE)  # slower ones
        slow = self._allowed + 1
        self._by_age: deque[float] = deque([1.0] * (TAIL_STEPS - slow) + [FIRST_TAIL] * slow)
        self._by_size = sorted(self._by_age)

    @property
    def factor(self) -> float:
        """Within TAIL_LIMITS."""
        low, high = TAIL_LIMITS
        return min(max(self._by_size[-1 - self._allowed], low), high)

    def see(self, step_ms: float, expected_ms: float) -> None:
        """Of a step for which `expected_ms` is usual."""
        ratio = step_ms / expected_ms
        del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        self._by_age.append(ratio)
        insort(self._by_size, ratio)
