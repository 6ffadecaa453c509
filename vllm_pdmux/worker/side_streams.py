# SPDX-License-Identifier: Apache-2.0
"""Streams that a model's layers use beside the current one: off, since their work would leave the lane's SMs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from vllm_pdmux.support import UnsupportedError


def turn_off(model: torch.nn.Module) -> int:
    """Let shared experts run after the others instead of beside them; how many layers that was.

    Raises UnsupportedError for streams of other layers, which cannot be turned off.
    """
    turned_off, others = 0, []
    for name, module in model.named_modules():
        for attribute in _streams(module):
            if isinstance(module, SharedExperts) and attribute == "_stream":
                module._stream = None
                turned_off += 1
            else:
                others.append(f"{name}.{attribute}")
    if others:
        raise UnsupportedError(
            [
                f"{type(model).__name__} runs layers on streams of their own ({len(others)}, such as {others[0]}), "
                "which would leave the SMs of the lane: serve this model without the plugin"
            ]
        )
    return turned_off


def _streams(module: torch.nn.Module) -> Iterator[str]:
    """The attributes of a module that hold a stream, or a list of them."""
    for attribute, value in list(vars(module).items()):
        values = value if isinstance(value, (list, tuple)) else (value,)
        if any(_is_stream(one) for one in values):
            yield attribute


def _is_stream(value: Any) -> bool:
    return isinstance(value, torch.cuda.Stream)
