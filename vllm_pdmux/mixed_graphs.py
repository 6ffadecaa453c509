# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's steps that prefill and decode in one batch have CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def mixed_graph_tokens(vllm_config: VllmConfig) -> int:
    """Tokens of the largest such step with a graph, piecewise or full; 0: none has one."""
    from vllm.config import CUDAGraphMode

    config = vllm_config.compilation_config
    mode = config.cudagraph_mode
    if mode is None or mode.mixed_mode() == CUDAGraphMode.NONE:
        return 0
    return config.max_cudagraph_capture_size or 0
