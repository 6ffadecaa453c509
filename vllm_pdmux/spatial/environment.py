# SPDX-License-Identifier: Apache-2.0
"""What around the process may keep two streams from running beside each other on one GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LEAST_CONNECTIONS = 8  # the driver's default: enough for the lanes' streams and the copies of their results
_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")


def connection_problem(environ: Mapping[str, str]) -> str | None:
    """What is wrong with CUDA_DEVICE_MAX_CONNECTIONS, or None."""
    value = environ.get(MAX_CONNECTIONS)
    if value is None or (value.isdecimal() and int(value) >= LEAST_CONNECTIONS):
        return None
    return (
        f"{MAX_CONNECTIONS}={value}: streams share hardware queues below {LEAST_CONNECTIONS}, so that a decode step "
        f"may wait behind prefill layers: unset it or set it to {LEAST_CONNECTIONS} or more"
    )


def mps_problem(device: int) -> str | None:
    """That the device is shared through MPS, or None: also where the driver cannot say."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if attribute is None:
        return None
    error, value = driver.cuDeviceGetAttribute(attribute, device)
    if error != driver.CUresult.CUDA_SUCCESS or not value:
        return None
    return (
        "the GPU is shared through MPS, whose clients use SMs that a partition does not know of: stop the MPS daemon, "
        "or keep other clients off this GPU"
    )


def other_processes(uuid: str) -> list[str]:
    """ "pid 12, 3456 MiB" of each other process on the GPU with this UUID; empty where nvidia-smi cannot say."""
    try:
        run = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in run.stdout.splitlines() if run.returncode == 0 else ():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            found += [f"pid {fields[1]}, {fields[2]} MiB"] if fields[1] != str(os.getpid()) else []
    return found


def problems(environ: Mapping[str, str], device: int, uuid: str) -> list[str]:
    """All that is found, each with the remedy."""
    others = other_processes(uuid)
    sharing = (
        f"other processes use the GPU ({'; '.join(others)}): what they run takes SMs and bandwidth from both lanes; "
        "serve on a GPU of its own"
    )
    found = [connection_problem(environ), mps_problem(device), sharing if others else None]
    return [problem for problem in found if problem is not None]
