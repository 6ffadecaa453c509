# SPDX-License-Identifier: Apache-2.0
"""How fast prefill must be for the prompts that wait to have their first tokens in time."""

from __future__ import annotations

import math

from vllm_pdmux.policy.types import Load

# What is planned with, of the target for the first token: prompts of one batch have theirs together, when it ends, and
# others arrive meanwhile.
TTFT_PLANNED = 0.75


def needed_rate(load: Load, ttft_ms: float | None) -> float:
    """Work per ms that the prompts of `load` need to keep `ttft_ms`, served in order: what the one with the least time
    for the work before it needs. Infinite where one has waited for too long to."""
    if ttft_ms is None:
        return 0.0
    planned_ms = ttft_ms * TTFT_PLANNED
    return max((_rate(work, planned_ms - wait_ms) for work, wait_ms in load.first_tokens), default=0.0)


def _rate(work: float, left_ms: float) -> float:
    if not work:
        return 0.0
    return work / left_ms if left_ms > 0 else math.inf
