# SPDX-License-Identifier: Apache-2.0
"""Every metric: its name in ``/metrics``, type, label and help. docs/metrics.md has a table of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pdmux.policy import LANE_EMPTY, OFF, SOONER

PREFIX = "vllm_pdmux:"

STEPS = PREFIX + "steps_total"
STEP_SECONDS = PREFIX + "step_seconds"
BESIDE_STEPS = PREFIX + "beside_steps_total"
BESIDE_SECONDS = PREFIX + "beside_seconds_total"
DIVISION_CHANGES = PREFIX + "division_changes_total"
DRY_STEPS = PREFIX + "dry_steps_total"
DRY_SECONDS = PREFIX + "dry_seconds_total"
UNCONFINED_STEPS = PREFIX + "unconfined_steps_total"
FUSED_STEPS = PREFIX + "fused_steps_total"
FUSED_TOKENS = PREFIX + "fused_prefill_tokens_total"
BATCHES = PREFIX + "prefill_batches_total"
LAYERS = PREFIX + "prefill_layers_total"
LAYER_GROUPS = PREFIX + "prefill_layer_groups_total"
TOKENS = PREFIX + "prefill_tokens_total"
JOINS = PREFIX + "joins_total"
MISSED_STEPS = PREFIX + "missed_steps_total"
INFEASIBLE_DECISIONS = PREFIX + "infeasible_decisions_total"
PREDICTION = PREFIX + "beside_prediction_ratio"
DIVISION = PREFIX + "division"
BATCHES_IN_LANE = PREFIX + "batches_in_lane"
LEAD = PREFIX + "lead_layers"

DECODE, PREFILL, FUSED, BESIDE = KINDS = ("decode", "prefill", "fused", "beside")
TIMED_KINDS = (DECODE, FUSED, BESIDE)  # those in which requests decode: what a step takes is their ITL
ENDED, FAILED, DROPPED = RESULTS = ("ended", "failed", "dropped")
STOCK = "stock"  # a fused step that no policy has asked for
FUSED_REASONS = (SOONER, LANE_EMPTY, OFF, STOCK)

# Upper bounds. Seconds: close where decode steps of a GPU are, and up to where an answer visibly stops.
STEP_SECONDS_BUCKETS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0),
)
PREDICTION_BUCKETS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)

SUM = "sum"  # the part of a histogram that is no bucket


@dataclass(frozen=True)
class Metric:
    """One metric. Its values are integers until they are shown."""

    name: str
    help: str
    label: str | None = None  # beside those that vLLM's own metrics have
    label_values: tuple[str, ...] = ()
    is_gauge: bool = False
    unit: float = 1.0  # what an integer stands for: 1e-6 where microseconds are shown as seconds
    buckets: tuple[float, ...] = ()  # of a histogram, the upper bounds; beyond the last is one more bucket

    @property
    def type(self) -> str:
        """As Prometheus has it."""
        if self.buckets:
            return "histogram"
        return "gauge" if self.is_gauge else "counter"

    def series(self) -> list[str]:
        """The keys of its values: one for each value of its label. Of a histogram, the keys of its parts begin so."""
        return [key_of(self.name, value) for value in self.label_values] if self.label else [self.name]


def key_of(name: str, label_value: str | int) -> str:
    """The key of the metric `name` for one value of its label, or of a series for one of its parts.

    The parts of a histogram are its buckets by number, each without those below it, and SUM, in its unit.
    """
    return f"{name}/{label_value}"


def metrics(splits: int, has_target: bool) -> tuple[Metric, ...]:
    """The metrics of an engine with `splits` divisions; those of targets only where a policy has one."""
    groups = tuple(str(group) for group in range(1, splits + 1))
    found = [
        Metric(STEPS, "Engine steps that have run, by kind.", "kind", KINDS),
        Metric(
            STEP_SECONDS,
            "Seconds that steps have taken in which requests decode, by kind.",
            "kind",
            TIMED_KINDS,
            unit=1e-6,
            buckets=STEP_SECONDS_BUCKETS,
        ),
        Metric(BESIDE_STEPS, "Decode steps with prefill layers beside them, by group.", "group", groups),
        Metric(BESIDE_SECONDS, "Seconds that these steps have taken, by group.", "group", groups, unit=1e-6),
        Metric(DIVISION_CHANGES, "Steps beside prefill in another group than the one before."),
        Metric(DRY_STEPS, "Steps beside prefill in part of which the lane had nothing to run."),
        Metric(DRY_SECONDS, "Seconds that these steps have taken, the lane's work in them included.", unit=1e-6),
        Metric(UNCONFINED_STEPS, "Steps of disjoint groups for whose size there is no CUDA graph: on all SMs."),
        Metric(FUSED_STEPS, "Steps that decoded and prefilled in one batch, by reason.", "reason", FUSED_REASONS),
        Metric(FUSED_TOKENS, "Prompt tokens of these steps, by reason.", "reason", FUSED_REASONS),
        Metric(BATCHES, "Prefill batches that have left the lane, by result.", "result", RESULTS),
        Metric(LAYERS, "Layers that prefill batches have advanced in the lane."),
        Metric(LAYER_GROUPS, "Layer groups: the layers of one batch in one step each."),
        Metric(TOKENS, "Tokens of the prefill batches that have ended in the lane."),
        Metric(JOINS, "Requests that have entered decode from the lane."),
    ]
    if has_target:
        found += [
            Metric(MISSED_STEPS, "Steps with prefill, beside or fused, that took longer than the target for ITL."),
            Metric(INFEASIBLE_DECISIONS, "Decisions for which nothing was expected to keep the target for ITL."),
            Metric(
                PREDICTION,
                "Measured over predicted time of steps beside prefill.",
                unit=1e-6,
                buckets=PREDICTION_BUCKETS,
            ),
        ]
    return (
        *found,
        Metric(DIVISION, "Group of the last step; 0 and the last: prefill or decode has all SMs.", is_gauge=True),
        Metric(BATCHES_IN_LANE, "Prefill batches in the lane.", is_gauge=True),
        Metric(LEAD, "Layers that the lane keeps queued ahead of the GPU; 0 without a queue.", is_gauge=True),
    )


GAUGES = frozenset((DIVISION, BATCHES_IN_LANE, LEAD))


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
