# SPDX-License-Identifier: Apache-2.0
"""How much longer than usual the slow steps take."""

from __future__ import annotations

from dataclasses import dataclass

# The share of steps that may be slower than a target, and the bounds of the factor that is learned for it.
TAIL_SHARE = 0.02
TAIL_LIMITS = (1.02, 2.0)
FIRST_TAIL = 1.15
TAIL_STEP = 0.03


@dataclass
class Tail:
    """The factor over the expected time that all but TAIL_SHARE of the steps keep, found by small moves."""

    factor: float = FIRST_TAIL

    def see(self, step_ms: float, expected_ms: float) -> None:
        """Of a step for which `expected_ms` is usual."""
        is_slow = step_ms > expected_ms * self.factor
        moved = self.factor + TAIL_STEP * ((1 - TAIL_SHARE) if is_slow else -TAIL_SHARE)
        self.factor = min(max(moved, TAIL_LIMITS[0]), TAIL_LIMITS[1])
