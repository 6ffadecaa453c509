# SPDX-License-Identifier: Apache-2.0
"""For which engines a calibration holds: those that are the same in all that changes how long steps take.

It is worked out from an engine's config alone, so that the command that calibrates and every engine that serves come to
the same one, before and after a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pdmux import __version__
from vllm_pdmux.activation import metadata_version
from vllm_pdmux.calibration.samples import Division
from vllm_pdmux.config import PDMuxConfig
from vllm_pdmux.spatial import stream_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CPU_INFO = Path("/proc/cpuinfo")
# Of the model's own config, where it has them.
_SHAPE = ("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok")


def key_of(vllm_config: VllmConfig, settings: PDMuxConfig) -> dict[str, Any]:
    """What must be equal, as plain values that JSON keeps."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    device, units = _device()
    return {
        "device": device,
        "units": units,  # SMs of a GPU, cores of a CPU
        "architecture": model.architecture,
        "hidden": model.get_hidden_size(),
        "layers": model.get_num_layers(parallel),
        "heads": model.get_num_attention_heads(parallel),
        "kv_heads": model.get_num_kv_heads(parallel),
        "head": model.get_head_size(),
        "vocabulary": model.get_vocab_size(),
        **{name: value for name in _SHAPE if (value := getattr(text, name, None)) is not None},
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": None if model.quantization is None else str(model.quantization),
        "quantization_config": _digest(getattr(model.hf_config, "quantization_config", None)),
        "eager": bool(model.enforce_eager),
        "compilation": str(vllm_config.compilation_config.mode),
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "lane": settings.lane,
        "max_prefill_tokens": settings.max_prefill_tokens,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "vllm": " ".join(metadata_version()),
        "vllm_pdmux": __version__,
        "groups": [[one.sharing, one.prefill_sms, one.decode_sms] for one in divisions(settings)],
        "backend": settings.backend if _is_gpu() else "serial",
    }


def divisions(settings: PDMuxConfig) -> tuple[Division, ...]:
    """The mixed groups that are asked for on this device; none on a CPU."""
    if not _is_gpu():
        return ()
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    groups = stream_groups(settings, current_platform.num_compute_units(), (capability.major, capability.minor))
    return tuple(Division(group.sharing, group.prefill_sms, group.decode_sms) for group in groups[1:-1])


def describe(key: dict[str, Any]) -> str:
    """What a person would call it."""
    model = f"{key['architecture']} with {key['layers']} layers of {key['hidden']} in {key['dtype']}"
    return f"{model} on {key['device']} ({key['units']})"


def _digest(value: Any) -> str | None:
    """Of a method of quantization: its bits, group sizes and the like."""
    if value is None:
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _is_gpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _device() -> tuple[str, int]:
    if not _is_gpu():
        return _cpu(), os.cpu_count() or 1  # not those of this process, which vLLM binds when it starts
    from vllm.platforms import current_platform

    return current_platform.get_device_name(), current_platform.num_compute_units()


def _cpu() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
