# SPDX-License-Identifier: Apache-2.0
"""Made-up weights of a width that makes logits differ: vLLM's own are so narrow that every model says the same."""

from __future__ import annotations

import itertools

import torch
from vllm.model_executor.model_loader import dummy_loader

_seeds = itertools.count()


def install() -> None:
    """Let the dummy loader of this process draw weights as a new model would have them, the same in every process."""
    dummy_loader.initialize_single_dummy_weight = draw


@torch.no_grad()
def draw(tensor: torch.Tensor, *args, name: str = "", **kwargs) -> None:
    """Fill `tensor`: norms with ones, scales near 0.01, integers with any bits, weights with 1 / sqrt(inputs)."""
    generator = torch.Generator(tensor.device).manual_seed(next(_seeds))
    if not tensor.is_floating_point():
        if tensor.dtype == torch.int32 and tensor.dim() > 1:
            limits = torch.iinfo(tensor.dtype)
            tensor.random_(limits.min, limits.max, generator=generator)
    elif "scale" in name:
        tensor.uniform_(0.005, 0.015, generator=generator)
    elif tensor.dim() < 2:
        tensor.fill_(1.0)
    else:
        values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.copy_(values.normal_(0, tensor.shape[-1] ** -0.5, generator=generator))
