# SPDX-License-Identifier: Apache-2.0
"""The periodic line of the log: what was counted since the last one."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pdmux.metrics import definitions as names
from vllm_pdmux.metrics.definitions import key_of

# Said only when there is any.
TROUBLES = {
    key_of(names.BATCHES, names.FAILED): "%d batches failed",
    key_of(names.BATCHES, names.DROPPED): "%d batches dropped",
    names.DRY_STEPS: "lane dry in %d steps",
    names.UNCONFINED_STEPS: "no decode graph in %d steps",
    names.MISSED_STEPS: "above the target in %d steps",
    names.INFEASIBLE_DECISIONS: "target out of reach %d times",
}


def log_line(before: Mapping[str, int], now: Mapping[str, int], label_texts: Mapping[str, str]) -> str | None:
    """The line for two sets of values; None when no step has run between them."""

    def count(name: str, label_value: str | None = None) -> int:
        key = name if label_value is None else key_of(name, label_value)
        value, last = now.get(key, 0), before.get(key, 0)
        # As prometheus does: a counter that fell has begun again, with its engine.
        return value - last if value >= last else value

    steps = {kind: count(names.STEPS, kind) for kind in names.KINDS}
    if not any(steps.values()):
        return None
    groups = [key.partition("/")[2] for key in now if key.startswith(f"{names.BESIDE_STEPS}/")]
    parts = {
        names.FUSED: {reason: count(names.FUSED_STEPS, reason) for reason in names.FUSED_REASONS},
        names.BESIDE: {label_texts.get(one, f"group {one}"): count(names.BESIDE_STEPS, one) for one in groups},
    }
    text = "steps: " + ", ".join(f"{n} {kind}{_in_brackets(parts.get(kind, {}))}" for kind, n in steps.items())
    sums_us = {kind: count(key_of(names.STEP_SECONDS, kind), names.SUM) for kind in names.TIMED_KINDS if steps[kind]}
    if means := ", ".join(f"{kind} {us / steps[kind] / 1e3:.1f} ms" for kind, us in sums_us.items()):
        text += f"; mean: {means}"
    text += (
        f"; lane: {count(names.BATCHES, names.ENDED)} batches, {count(names.TOKENS)} tokens, "
        f"{count(names.LAYERS)} layers in {count(names.LAYER_GROUPS)} groups, {count(names.JOINS)} joins"
    )
    troubles = [said % n for key, said in TROUBLES.items() if (n := count(key))]
    return "; ".join([text, *troubles])


def _in_brackets(counts: Mapping[str, int]) -> str:
    """Those that are not 0."""
    shown = ", ".join(f"{label}: {n}" for label, n in counts.items() if n)
    return f" ({shown})" if shown else ""
