# SPDX-License-Identifier: Apache-2.0
"""What is global in vLLM's worker process and belongs to one forward pass: exchanged when control changes lanes."""

from __future__ import annotations

import vllm.forward_context as forward_context


class ForwardContextSwap:
    """Keeps the forward context of the lane that does not run.

    vLLM holds it in one module global for the whole process, so a suspended forward pass would otherwise find the
    decode lane's attention metadata when it continues.
    """

    def __init__(self) -> None:
        self._away: forward_context.ForwardContext | None = None

    def swap(self) -> None:
        """Exchange the current forward context with the kept one."""
        self._away, forward_context._forward_context = forward_context._forward_context, self._away
