# SPDX-License-Identifier: Apache-2.0
"""The models of the GPU tests, as arguments of `vllm.LLM`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import tiny_model

NOT_COMPILED = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}  # starts in half of the time


def arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """What `vllm.LLM` needs for the model of a spec (schedule_process.py)."""
    if spec["model"] == "tiny":
        return {"model": wide_model(Path(tempfile.mkdtemp()))}
    if "path" in spec:
        return {"model": spec["path"]}
    import shapes
    import wide_weights

    wide_weights.install()
    changes = {"num_hidden_layers": spec["layers"]} if "layers" in spec else {}
    return shapes.arguments(spec["model"], **changes)


def wide_model(folder: Path) -> str:
    """The tiny model, wider: FlashAttention wants heads of 64 and 16-bit weights."""
    sizes = {"HIDDEN": 512, "HEADS": 8, "KV_HEADS": 2, "INTERMEDIATE": 1024, "HEAD": 64}
    for name, value in sizes.items():
        setattr(tiny_model, name, value)
    tiny_model.build(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return str(folder)
