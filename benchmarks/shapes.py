# SPDX-License-Identifier: Apache-2.0
"""Models of a known shape with made-up weights: speed depends on the shape alone, so no model is needed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "attention_bias": False,
}
_LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
_QWEN3_30B_A3B = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_8B,
    "llama-8b-fp8": _LLAMA_8B,  # quantised by vLLM when it loads
    "llama-8b-gptq": {**_LLAMA_8B, "quantization_config": _GPTQ, "torch_dtype": "float16"},
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "toy": {
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    },
}


def arguments(shape: str, **changes: Any) -> dict[str, Any]:
    """What `vllm.LLM` needs for a model of this shape, the name of one of CONFIGS with `changes` to its config."""
    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (folder / "config.json").write_text(json.dumps({**CONFIGS[shape], **changes}))
    found: dict[str, Any] = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    if shape.endswith("-fp8"):
        found["quantization"] = "fp8"
    return found


def vocabulary(shape: str) -> int:
    """Number of tokens of the shape's vocabulary."""
    return CONFIGS[shape]["vocab_size"]
