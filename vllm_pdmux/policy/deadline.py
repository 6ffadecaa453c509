# SPDX-License-Identifier: Apache-2.0
"""How fast prefill must be for the prompts that wait to have their first tokens in time."""

from __future__ import annotations

import math

from vllm_pdmux.policy.types import Load

# What is planned with, of the target for the first token: prompts of one batch have theirs together, when it ends, and
# others arrive meanwhile.
TTFT_PLANNED = 0.75


def needed_rate(load: Load, ttft_ms: float | None) -> float:
    """Work per ms that the prompts of `load` need to keep `ttft_ms`; infinite where one has waited for too long to.

    The oldest prompt is taken to be in the batch in the lane, or first in the queue; the newest one last.
    """
    if ttft_ms is None:
        return 0.0
    planned_ms = ttft_ms * TTFT_PLANNED
    first = _rate(load.lane_work, planned_ms - load.oldest_wait_ms)
    return max(first, _rate(load.lane_work + load.waiting_work, planned_ms - load.newest_wait_ms))


def _rate(work: float, left_ms: float) -> float:
    if not work:
        return 0.0
    return work / left_ms if left_ms > 0 else math.inf
