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
    names.INFEASIBLE_DECISIONS: "no division for the target %d times",
}


def log_line(before: Mapping[str, int], now: Mapping[str, int], label_texts: Mapping[str, str]) -> str | None:
    """The line for two sets of values; None when no step has run between them."""

    def count(name: str, label_value: str | None = None) -> int:
        key = name if label_value is None else key_of(name, label_value)
        return now.get(key, 0) - before.get(key, 0)

    steps = {kind: count(names.STEPS, kind) for kind in names.KINDS}
    if not any(steps.values()):
        return None
    text = "steps: " + ", ".join(f"{n} {kind}" for kind, n in steps.items())
    groups = [key.partition("/")[2] for key in now if key.startswith(f"{names.BESIDE_STEPS}/")]
    beside = {label_texts.get(group, f"group {group}"): count(names.BESIDE_STEPS, group) for group in groups}
    if shown := ", ".join(f"{label}: {n}" for label, n in beside.items() if n):
        text += f" ({shown})"
    text += (
        f"; lane: {count(names.BATCHES, names.ENDED)} batches, {count(names.TOKENS)} tokens, "
        f"{count(names.LAYERS)} layers, {count(names.JOINS)} joins"
    )
    troubles = [said % n for key, said in TROUBLES.items() if (n := count(key))]
    return "; ".join([text, *troubles])
