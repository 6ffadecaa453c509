# SPDX-License-Identifier: Apache-2.0
"""What a decode step of a model reads from memory, from its config alone and roughly: only the ratio matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pdmux.policy import DecodeAlone

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def decode_alone(vllm_config: VllmConfig) -> DecodeAlone:
    """A model of decode steps whose scale is to be learned."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    layers, head = model.get_num_layers(parallel), model.get_head_size()
    kv_heads, heads = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)
    hidden = model.get_hidden_size()
    # A mixture of experts reads the experts that are chosen; at larger batches more, which is learned.
    experts = getattr(text, "num_experts_per_tok", None) or 1
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * hidden)
    attention = hidden * head * 2 * (heads + kv_heads)
    parameters = layers * (attention + 3 * hidden * width * experts) + hidden * model.get_vocab_size()
    return DecodeAlone(weight_bytes=2.0 * parameters, kv_bytes_per_token=2.0 * 2 * layers * kv_heads * head)
