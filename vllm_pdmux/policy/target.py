# SPDX-License-Identifier: Apache-2.0
"""The targets of policy slo."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TARGET = 1.5  # times a decode step alone, when no target is given
# Neither lane starves: a prompt that has waited for so long lets ITL grow, but not above so many times its target.
PREFILL_WAIT_LIMIT_MS = 10_000.0
ITL_LIMIT = 4.0


@dataclass(frozen=True)
class Target:
    """What the user asks for. `itl_ms` None: DEFAULT_TARGET times decode alone. `ttft_ms` None: in order of arrival.

    `prefill_wait_limit_ms`: from when on a prompt's wait counts for more than `itl_ms`. `itl_limit_ms`: what ITL should
    keep even then; None: ITL_LIMIT times its target.
    """

    itl_ms: float | None = None
    ttft_ms: float | None = None
    prefill_wait_limit_ms: float = PREFILL_WAIT_LIMIT_MS
    itl_limit_ms: float | None = None

    def of(self, alone_ms: float, wait_ms: float = 0.0) -> float:
        """The ITL that a load should keep whose decode step takes `alone_ms` alone and whose oldest prompt has waited
        for `wait_ms`."""
        target_ms = self.itl_ms if self.itl_ms is not None else alone_ms * DEFAULT_TARGET
        if wait_ms <= self.prefill_wait_limit_ms:
            return target_ms
        return max(target_ms, self.itl_limit_ms) if self.itl_limit_ms is not None else target_ms * ITL_LIMIT
