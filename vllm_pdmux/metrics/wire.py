# SPDX-License-Identifier: Apache-2.0
"""How the integers get from the engine to the front ends.

What: they ride in ``SchedulerStats.running_lora_adapters``, under keys with our prefix, and are taken out again before
vLLM's own loggers see the statistics.
Why: SchedulerStats has no free field, what is not a field is lost where it is encoded, and vLLM has no other way from a
scheduler to a front end. A scheduler leaves the field empty; the front end adds the names of adapters to it.
To be deleted when vLLM lets a scheduler add statistics of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_pdmux.metrics.definitions import GAUGES, PREFIX

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats


def is_read(environ: Mapping[str, str]) -> bool:
    """Whether the front end takes our values out again: not vLLM's own in Rust, to which they are names of adapters."""
    return environ.get("VLLM_USE_RUST_FRONTEND", "0") in ("", "0")


class Shares:
    """Of each counter, each front end's share: all shares together are the counter.

    vLLM gives a step's statistics to only one of several API servers, each of which adds what it is told to what the
    others show. What was counted since any of them was last told belongs to the one that is told now. A share is
    cumulative, so that a message that is lost loses nothing.
    """

    def __init__(self) -> None:
        self._shares: dict[int, dict[str, int]] = {}
        self._told: dict[str, int] = {}  # to all of them together

    def of(self, client_index: int, values: Mapping[str, int]) -> dict[str, int]:
        """What to tell a front end, when the engine has counted `values`. A gauge is the same for all."""
        share, told = self._shares.setdefault(client_index, {}), self._told
        for key, value in values.items():
            if value != (before := told.get(key, 0)):  # a few of them, after each step
                share[key] = share.get(key, 0) + value - before
                told[key] = value
        share.update((key, values[key]) for key in GAUGES if key in values)
        return dict(share)


def attach(outputs: Mapping[int, EngineCoreOutputs], values: Mapping[str, int], shares: Shares) -> None:
    """Put `values` on the statistics among a step's `outputs`, by client index."""
    for client_index, one in outputs.items():
        if one.scheduler_stats is not None:
            one.scheduler_stats.running_lora_adapters.update(shares.of(client_index, values))


def take(stats: SchedulerStats) -> dict[str, int]:
    """Take our values out of `stats`; empty when the message has none."""
    carried = stats.running_lora_adapters
    return {key: carried.pop(key) for key in list(carried) if key.startswith(PREFIX)}
