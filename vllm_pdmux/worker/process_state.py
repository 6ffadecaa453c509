# SPDX-License-Identifier: Apache-2.0
"""What is global in vLLM's worker process and belongs to one lane: exchanged when control changes lanes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import vllm.forward_context as forward_context

# Scratch on the device that a module keeps for the whole process: samplings of two lanes overlap on a GPU, and would
# write to the same. Modules that are not loaded, or that have no such name, have no such scratch.
SCRATCH = (
    ("vllm.v1.sample.ops.topk_topp_triton", "_TRITON_BUFFER_CACHE"),
    ("vllm.v1.sample.ops.topk_topp_triton", "_TRITON_SPLIT_CACHE"),
    ("flashinfer.utils", "_cache_buf"),
)


class Swapped(Protocol):
    """Something else of which each lane has its own."""

    def swap(self) -> None:
        """Exchange what is in place with what is kept."""


class ProcessState:
    """Keeps what belongs to the lane that does not run.

    vLLM holds the forward context in one module global for the whole process, so a suspended forward pass would
    otherwise find the decode lane's attention metadata when it continues. Scratch is looked up when a kernel is
    launched, so each lane finds the dictionary that is there while it runs. `others`: communicators, where there are
    several ranks, and the adapters of LoRA.
    """

    def __init__(self, others: Iterable[Swapped] = ()) -> None:
        self._others = tuple(others)
        self._away: forward_context.ForwardContext | None = None
        self._scratch: dict[tuple[str, str], dict[Any, Any]] = {}

    def swap(self) -> None:
        """Exchange what is in place with what is kept."""
        self._away, forward_context._forward_context = forward_context._forward_context, self._away
        for name in SCRATCH:
            module, attribute = sys.modules.get(name[0]), name[1]
            if module is not None and hasattr(module, attribute):
                kept = self._scratch.get(name, {})
                self._scratch[name] = getattr(module, attribute)
                setattr(module, attribute, kept)
        for other in self._others:
            other.swap()
