# SPDX-License-Identifier: Apache-2.0
"""What the scheduler counts. Knows nothing of vLLM: steps, orders and reports are only read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pdmux.messages import LaneReport, PrefillOrder
from vllm_pdmux.metrics import definitions as names
from vllm_pdmux.metrics.definitions import key_of
from vllm_pdmux.step_times import StepTime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Counters:
    """Integers by key, since the engine started. Only an engine that keeps statistics has one."""

    def __init__(self, splits: int, has_target: bool):
        self.values = {key: 0 for metric in names.metrics(splits, has_target) for key in metric.keys()}
        self._all_for_decode = splits + 1  # the group
        self._has_target = has_target
        self._group: int | None = None  # of the last step beside prefill

    def done(self, output: SchedulerOutput, took: StepTime, order: PrefillOrder, report: LaneReport | None) -> None:
        """The step `output` has come back."""
        kind = kind_of(output, report)
        self._add(key_of(names.STEPS, kind))
        group = self._all_for_decode if kind == names.DECODE else 0
        if kind == names.BESIDE and report is not None:
            group = order.group
            self._add(key_of(names.BESIDE_STEPS, group))
            self._add(key_of(names.BESIDE_SECONDS, group), round(took.ms * 1e3))
            self._add(names.DIVISION_CHANGES, self._group not in (None, group))
            self._add(names.DRY_STEPS, not report.is_saturated)
            self._group = group
        self.values[names.DIVISION] = group
        if report is not None:
            self._add(names.LAYERS, sum(run.end_layer - run.first_layer for run in report.runs))
            self._raise_to(names.UNCONFINED_STEPS, report.unconfined_steps)

    def batch_ended(self, tokens: int, joins: int) -> None:
        """A batch of so many tokens has ended; so many of its requests decode now."""
        self._add(key_of(names.BATCHES, names.ENDED))
        self._add(names.TOKENS, tokens)
        self._add(names.JOINS, joins)

    def batches_left(self, result: str, count: int = 1) -> None:
        """So many batches have failed or were dropped."""
        self._add(key_of(names.BATCHES, result), count)

    def look_at(self, policy: Any, batches_in_lane: int) -> None:
        """Take over what the policy counts itself, and the state of the lane."""
        self.values[names.BATCHES_IN_LANE] = batches_in_lane
        if self._has_target:
            self._raise_to(names.MISSED_STEPS, getattr(policy, "missed_steps", 0))
            self._raise_to(names.INFEASIBLE_DECISIONS, getattr(policy, "infeasible_decisions", 0))

    def _add(self, key: str, count: int = 1) -> None:
        self.values[key] = self.values.get(key, 0) + count

    def _raise_to(self, key: str, total: int) -> None:
        self.values[key] = max(self.values[key], total)


def kind_of(output: SchedulerOutput, report: LaneReport | None) -> str:
    """What a step with something in it was. A request with one token counts as decoding, which a prompt may have left.

    An order that came when its batch had ended has no report: then the step was stock's.
    """
    tokens = output.total_num_scheduled_tokens
    if report is not None:
        return names.BESIDE if tokens else names.PREFILL
    scheduled = output.num_scheduled_tokens
    if tokens == len(scheduled):
        return names.DECODE
    return names.FUSED if 1 in scheduled.values() else names.PREFILL
