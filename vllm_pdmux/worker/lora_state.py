# SPDX-License-Identifier: Apache-2.0
"""Adapters of LoRA: which token has which is kept in the model, which has one such table for two lanes."""

from __future__ import annotations

import copy
from typing import Any


class LoraState:
    """Keeps the table of the lane that does not run, and sees to it that a suspended lane loses no adapter.

    vLLM writes the table when a step begins, into wrappers of its kernels that all layers share, and writes nothing
    where the step has the table of the one before. Both are exchanged when control changes lanes. Weights of adapters
    are in slots, which the lanes have in common.
    """

    def __init__(self, manager: Any):
        self._manager = manager  # vLLM's LoRAModelManager
        self._wrappers = list(manager.punica_wrapper_mapping.values())
        self._away = [copy.deepcopy(vars(wrapper)) for wrapper in self._wrappers]
        self._away_last: tuple[Any, Any] = (None, None)

    def swap(self) -> None:
        """Exchange what is in place with what is kept."""
        for i, wrapper in enumerate(self._wrappers):
            self._away[i], wrapper.__dict__ = vars(wrapper), self._away[i]
        manager = self._manager
        last = manager._last_mapping, manager._last_slot_layout
        (manager._last_mapping, manager._last_slot_layout), self._away_last = self._away_last, last

    def slots(self) -> dict[int, int | None]:
        """The slot of each adapter that the lane in place uses, None where it has been evicted."""
        mapping, layout = self._manager._last_mapping, self._manager.lora_index_to_id
        used = {int(lora_id) for lora_id in mapping.prompt_mapping if lora_id > 0} if mapping is not None else set()
        return {lora_id: layout.index(lora_id) if lora_id in layout else None for lora_id in used}

    def check(self, before: dict[int, int | None]) -> None:
        """Raise if an adapter is not in the slot any more in which it was `before` the lane was suspended."""
        if (now := self.slots()) != before:
            raise RuntimeError(f"adapters of LoRA were moved while a prompt used them: slots {before} became {now}")


def lora_state_of(runner: Any) -> LoraState | None:
    """For the model of a V1 `runner`, which has adapters or not."""
    manager = getattr(runner, "lora_manager", None)
    return None if manager is None else LoraState(manager._adapter_manager)
