# SPDX-License-Identifier: Apache-2.0
"""Every metric: its name in ``/metrics``, its label and its help. The README has a table of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "vllm_pdmux:"

STEPS = PREFIX + "steps_total"
BESIDE_STEPS = PREFIX + "beside_steps_total"
BESIDE_SECONDS = PREFIX + "beside_seconds_total"
DIVISION_CHANGES = PREFIX + "division_changes_total"
DRY_STEPS = PREFIX + "dry_steps_total"
UNCONFINED_STEPS = PREFIX + "unconfined_steps_total"
BATCHES = PREFIX + "prefill_batches_total"
LAYERS = PREFIX + "prefill_layers_total"
TOKENS = PREFIX + "prefill_tokens_total"
JOINS = PREFIX + "joins_total"
MISSED_STEPS = PREFIX + "missed_steps_total"
INFEASIBLE_DECISIONS = PREFIX + "infeasible_decisions_total"
DIVISION = PREFIX + "division"
BATCHES_IN_LANE = PREFIX + "batches_in_lane"

DECODE, PREFILL, FUSED, BESIDE = KINDS = ("decode", "prefill", "fused", "beside")
ENDED, FAILED, DROPPED = RESULTS = ("ended", "failed", "dropped")


@dataclass(frozen=True)
class Metric:
    """One metric. Its values are integers until they are shown."""

    name: str
    help: str
    label: str | None = None  # beside those that vLLM's own metrics have
    label_values: tuple[str, ...] = ()
    is_gauge: bool = False
    unit: float = 1.0  # what an integer stands for: 1e-6 where microseconds are shown as seconds

    def keys(self) -> list[str]:
        """The keys under which its values are counted and carried: one for each value of its label."""
        return [key_of(self.name, value) for value in self.label_values] if self.label else [self.name]


def key_of(name: str, label_value: str | int) -> str:
    """The key of the metric `name` for one value of its label."""
    return f"{name}/{label_value}"


def metrics(splits: int, has_target: bool) -> tuple[Metric, ...]:
    """The metrics of an engine with `splits` divisions; those of targets only where a policy has one."""
    groups = tuple(str(group) for group in range(1, splits + 1))
    found = [
        Metric(STEPS, "Engine steps that have run, by kind.", "kind", KINDS),
        Metric(BESIDE_STEPS, "Decode steps with prefill layers beside them, by group.", "group", groups),
        Metric(BESIDE_SECONDS, "Seconds that these steps have taken, by group.", "group", groups, unit=1e-6),
        Metric(DIVISION_CHANGES, "Steps beside prefill in another group than the one before."),
        Metric(DRY_STEPS, "Steps beside prefill in part of which the lane had nothing to run."),
        Metric(UNCONFINED_STEPS, "Steps of disjoint groups for whose size there is no CUDA graph: on all SMs."),
        Metric(BATCHES, "Prefill batches that have left the lane, by result.", "result", RESULTS),
        Metric(LAYERS, "Layers that prefill batches have advanced in the lane."),
        Metric(TOKENS, "Tokens of the prefill batches that have ended in the lane."),
        Metric(JOINS, "Requests that have entered decode from the lane."),
    ]
    if has_target:
        found += [
            Metric(MISSED_STEPS, "Steps with prefill, beside or fused, that took longer than the target for ITL."),
            Metric(INFEASIBLE_DECISIONS, "Decisions for which no division was expected to keep the target for ITL."),
        ]
    return (
        *found,
        Metric(DIVISION, "Group of the last step; 0 and the last: prefill or decode has all SMs.", is_gauge=True),
        Metric(BATCHES_IN_LANE, "Prefill batches in the lane.", is_gauge=True),
    )


GAUGES = frozenset((DIVISION, BATCHES_IN_LANE))


def group_labels(
    manual_divisions: Sequence[tuple[int, int, int]], sharing: str | Sequence[str], is_partitioned: bool
) -> dict[str, str]:
    """Readable labels of groups by number: "5 disjoint 84:48". The number stays in them, since two rows may be alike.

    Without rows the split depends on the device, and where nothing is partitioned it has no meaning: the number alone.
    """
    if not is_partitioned:
        return {}
    kinds = [sharing] * len(manual_divisions) if isinstance(sharing, str) else sharing
    rows = zip(manual_divisions, kinds, strict=True)
    return {str(i): f"{i} {kind} {prefill}:{decode}" for i, ((prefill, decode, _), kind) in enumerate(rows, start=1)}
