# SPDX-License-Identifier: Apache-2.0
"""Measures engine steps for a policy that learns from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pdmux.messages import PrefillOrder, order_of
from vllm_pdmux.policy import Kind, Observation, Policy, PromptWork

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_STEP = "pdmux_step"


@dataclass(frozen=True)
class _Scheduled:
    """What a step was when it was scheduled."""

    at_s: float
    kind: Kind
    decode_batch: int
    context_tokens: int
    prefill_work: float
    group: int


class StepClock:
    """Tells `policy` of each step when its output has come back.

    A step takes from when it was scheduled, or from when the step before it came back if that was later: under
    asynchronous scheduling steps queue up, and with nothing to do there is time between them. A step with nothing in it
    does not count: it comes back when the host looks for it, which may be after it has launched the next one.
    """

    def __init__(self, policy: Policy, work: PromptWork, clock_s: Callable[[], float] = time.perf_counter):
        self._policy, self._work = policy, work
        self._clock_s = clock_s
        self._last_s = clock_s()

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
            step = _Scheduled(self._clock_s(), kind, decode_batch, context_tokens, prefill_work, order.group)
            setattr(output, _STEP, step)

    def done(self, output: SchedulerOutput, beside_work: float, is_saturated: bool) -> None:
        """The step `output` has come back; `beside_work`: of the prompts that went through the lane meanwhile.

        Where the lane was not `is_saturated` the step ran partly alone: it says nothing of either.
        """
        order = order_of(output)
        if not output.num_scheduled_tokens and (order is None or order.batch_id is None):
            return
        now_s, last_s = self._clock_s(), self._last_s
        self._last_s = now_s
        step: _Scheduled | None = getattr(output, _STEP, None)
        if step is None or (step.kind is Kind.BESIDE and not is_saturated):
            return
        self._policy.observe(
            Observation(
                kind=step.kind,
                step_ms=(now_s - max(step.at_s, last_s)) * 1e3,
                decode_batch=step.decode_batch,
                context_tokens=step.context_tokens,
                prefill_work=beside_work if step.kind is Kind.BESIDE else step.prefill_work,
                group=step.group,
            )
        )
