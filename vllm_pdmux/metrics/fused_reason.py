# SPDX-License-Identifier: Apache-2.0
"""Why a step decodes and prefills in one batch: noted on the step when it is scheduled, read when it has come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pdmux.metrics.definitions import STOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_pdmux.policy import Policy

_REASON = "pdmux_fused_reason"


def attach_reason(output: SchedulerOutput, policy: Policy) -> SchedulerOutput:
    """Note on the step `output` why `policy` has just asked for it; return it."""
    setattr(output, _REASON, getattr(policy, "fused_reason", STOCK))
    return output


def reason_of(output: SchedulerOutput) -> str:
    """Of a fused step."""
    return getattr(output, _REASON, STOCK)
