# SPDX-License-Identifier: Apache-2.0
"""Tells a policy that learns of engine steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pdmux.messages import PrefillOrder
from vllm_pdmux.policy import Kind, Observation, Policy, PromptWork
from vllm_pdmux.step_times import StepTime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_STEP = "pdmux_step"


@dataclass(frozen=True)
class _Scheduled:
    """What a step was when it was scheduled."""

    kind: Kind
    decode_batch: int
    context_tokens: int
    prefill_work: float
    group: int


class Observer:
    """Tells `policy` of each step when its output has come back; before that `judge`, of steps in part dry as well."""

    def __init__(
        self, policy: Policy, work: PromptWork, judge: Callable[[Observation, Policy, bool], None] | None = None
    ):
        self._policy, self._work, self._judge = policy, work, judge

    def scheduled(self, output: SchedulerOutput, order: PrefillOrder, requests: Mapping[str, Request]) -> None:
        """Note the step `output` as it is scheduled."""
        decode_batch = context_tokens = 0
        prefill_work = 0.0
        for req_id, tokens in output.num_scheduled_tokens.items():
            after = requests[req_id].num_computed_tokens  # the step is counted already
            if tokens == 1:
                decode_batch += 1
                context_tokens += after
            else:
                prefill_work += self._work.of(tokens, after - tokens)
        if order.batch_id is not None:
            kind = Kind.BESIDE if decode_batch else None
        else:
            kind = {(True, True): Kind.FUSED, (True, False): Kind.DECODE, (False, True): Kind.PREFILL}.get(
                (decode_batch > 0, prefill_work > 0)
            )
        if kind is not None:
            step = _Scheduled(kind, decode_batch, context_tokens, prefill_work, order.group)
            setattr(output, _STEP, step)

    def done(self, output: SchedulerOutput, took: StepTime, beside_work: float, is_saturated: bool) -> None:
        """The step `output` has come back; `beside_work`: of the prompts that went through the lane meanwhile.

        Where the lane was not `is_saturated` the step ran partly alone: it says nothing of either.
        """
        step: _Scheduled | None = getattr(output, _STEP, None)
        if step is None:
            return
        is_dry = step.kind is Kind.BESIDE and not is_saturated
        if is_dry and self._judge is None:
            return
        seen = Observation(
            kind=step.kind,
            step_ms=took.ms,
            decode_batch=step.decode_batch,
            context_tokens=step.context_tokens,
            prefill_work=beside_work if step.kind is Kind.BESIDE else step.prefill_work,
            group=step.group,
        )
        if self._judge is not None:
            self._judge(seen, self._policy, is_saturated)
        if not is_dry:
            self._policy.observe(seen)
