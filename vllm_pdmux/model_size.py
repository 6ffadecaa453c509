# SPDX-License-Identifier: Apache-2.0
"""What a model reads and computes for a token, from its config alone and roughly: only ratios matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pdmux.policy import DecodeAlone, PromptWork

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def decode_alone(vllm_config: VllmConfig) -> DecodeAlone:
    """A model of decode steps whose scale is to be learned."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kv = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return DecodeAlone(weight_bytes=2.0 * _parameters(vllm_config), kv_bytes_per_token=2.0 * 2 * kv)


def prompt_work(vllm_config: VllmConfig) -> PromptWork:
    """How the cost of a prompt's tokens grows: 2 operations for each weight, 4 for each pair and size of the heads."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    pair = 4 * model.get_num_layers(parallel) * model.get_num_attention_heads(parallel) * model.get_head_size()
    return PromptWork(2.0 * _parameters(vllm_config) / pair)


def _parameters(vllm_config: VllmConfig) -> float:
    """Weights that a token goes through."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    layers, head, hidden = model.get_num_layers(parallel), model.get_head_size(), model.get_hidden_size()
    kv_heads, heads = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)
    # Of a mixture of experts those that are chosen for it; a larger batch reads more, which is learned.
    experts = _number(getattr(text, "num_experts_per_tok", None), 1)
    width = _number(getattr(text, "intermediate_size", None), 4 * hidden)
    width = _number(getattr(text, "moe_intermediate_size", None), width)
    attention = hidden * head * 2 * (heads + kv_heads)
    weights: float = layers * (attention + 3 * hidden * width * experts) + hidden * model.get_vocab_size()
    return weights


def _number(value: Any, default: float) -> float:
    """A size, the mean where a config lists one for each layer, or `default` where it has none."""
    values = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, (int, float))]
    return sum(values) / len(values) if values and sum(values) > 0 else default
