# SPDX-License-Identifier: Apache-2.0
"""What the scheduler counts. Knows nothing of vLLM: steps, orders and reports are only read."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from vllm_pdmux.messages import LaneReport, PrefillOrder
from vllm_pdmux.metrics import definitions as names
from vllm_pdmux.metrics.definitions import key_of
from vllm_pdmux.metrics.fused_reason import reason_of
from vllm_pdmux.step_times import StepTime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_pdmux.policy import Observation, Policy


class Counters:
    """Integers by key, since the engine started. Only an engine that keeps statistics has one.

    What a histogram has not counted yet is not there: most of its buckets stay empty, and all that is there travels
    with every step.
    """

    def __init__(self, splits: int, has_target: bool):
        metrics = names.metrics(splits, has_target)
        self.values = {key: 0 for metric in metrics if not metric.buckets for key in metric.series()}
        self._all_for_decode = splits + 1  # the group
        self._has_target = has_target
        self._group: int | None = None  # of the last step beside prefill
        self._kind: str | None = None  # of the last step

    def done(self, output: SchedulerOutput, took: StepTime, order: PrefillOrder, report: LaneReport | None) -> None:
        """The step `output` has come back."""
        kind = self._kind = kind_of(output, report)
        self._add(key_of(names.STEPS, kind))
        if kind != names.PREFILL:
            self._observe(key_of(names.STEP_SECONDS, kind), took.ms / 1e3, names.STEP_SECONDS_BUCKETS)
        if kind == names.FUSED:
            reason, tokens = reason_of(output), output.num_scheduled_tokens.values()
            self._add(key_of(names.FUSED_STEPS, reason))
            self._add(key_of(names.FUSED_TOKENS, reason), sum(n for n in tokens if n != 1))
        group = self._all_for_decode if kind == names.DECODE else 0
        if kind == names.BESIDE and report is not None:
            group = order.group
            self._add(key_of(names.BESIDE_STEPS, group))
            self._add(key_of(names.BESIDE_SECONDS, group), round(took.ms * 1e3))
            self._add(names.DIVISION_CHANGES, self._group not in (None, group))
            if not report.is_saturated:
                self._add(names.DRY_STEPS)
                self._add(names.DRY_SECONDS, round(took.ms * 1e3))
            self._group = group
        self.values[names.DIVISION] = group
        if report is not None:
            for _, first_layer, end_layer in report.runs:
                self._add(names.LAYERS, end_layer - first_layer)
                self._add(names.LAYER_GROUPS, end_layer > first_layer)
            self.values[names.LEAD] = report.lead_layers
            self._raise_to(names.UNCONFINED_STEPS, report.unconfined_steps)

    def judge(self, step: Observation, policy: Policy, is_saturated: bool) -> None:
        """Compare the step that has just come back with what `policy`, which has yet to learn of it, expects.

        An order that came when its batch had ended is not judged: the policy was told of a step that it was not.
        """
        if self._kind not in (names.BESIDE, names.FUSED):
            return
        if (target_ms := policy.target_ms(step)) is not None:
            self._add(names.MISSED_STEPS, step.step_ms > target_ms)
        if is_saturated and (expected_ms := policy.expected_ms(step)) is not None:
            self._observe(names.PREDICTION, step.step_ms / expected_ms, names.PREDICTION_BUCKETS)

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
            self._raise_to(names.INFEASIBLE_DECISIONS, getattr(policy, "infeasible_decisions", 0))

    def _add(self, key: str, count: int = 1) -> None:
        self.values[key] = self.values.get(key, 0) + count

    def _observe(self, series: str, value: float, buckets: tuple[float, ...]) -> None:
        """Add a value to a histogram, in which it is kept in millionths."""
        self._add(key_of(series, bisect_left(buckets, value)))
        self._add(key_of(series, names.SUM), round(value * 1e6))

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
