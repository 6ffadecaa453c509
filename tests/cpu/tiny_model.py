# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama with a byte tokenizer, made on the spot.

Default dummy weights are so small that a model repeats two tokens whatever its KV cache holds. These are wide enough
that every layer and every position changes the tokens; test_sensitivity.py proves it.
"""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, EOS = 8, 128, 4, 2, 256, 256
HEAD = HIDDEN // HEADS
VOCAB = 257  # all bytes, and the end of a sequence
PRINTABLE = {"allowed_token_ids": [*range(94)]}  # for a request of a server: each token is a piece of text
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # its tokenizer has none


def build(folder: Path) -> Path:
    """Write the model's files to `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder)
    _write_tokenizer(folder)
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(20)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    # The output layer is scaled so that two candidates are hardly ever within rounding of each other.
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD, 2.0),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")  # noqa: S106 - a token of text
    assert fast.eos_token_id == EOS
    fast.save_pretrained(folder)
