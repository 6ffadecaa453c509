# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux calibrate`: measures how long steps take with this model on this device, for policy slo to begin with."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vllm_pdmux.calibration import CalibrationError
from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.engine_options import add_engine_options, check_engine, engine_arguments, refusals
from vllm_pdmux.cli.stdout import own_stdout
from vllm_pdmux.config import ConfigError, resolve

if TYPE_CHECKING:
    from vllm_pdmux.calibration.measure import Progress
    from vllm_pdmux.calibration.run import Calibration

NAME = "calibrate"
HELP = "Measure decode and prefill, alone and beside each other, once for a model on a device, for policy slo."

EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `calibrate`."""
    parser.add_argument("--model", required=True, help="folder or name of the model, as for vLLM")
    parser.add_argument("--config", help="configuration file, whose divisions are measured (default: PDMUX_CONFIG)")
    add_engine_options(parser)
    parser.add_argument("--force", action="store_true", help="measure again what is stored already")
    parser.add_argument("--out", type=Path, help="write the profile to this file too, for the setting calibration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure, unless that is stored already: 0; 1 when the errors are too large to store it.

    Raises CommandError when it cannot run as asked.
    """
    try:
        settings = _settings(args)
        check_engine(args.model)
        with own_stdout() as stdout:
            return _run(args, settings, stdout)
    except (CalibrationError, ConfigError) as error:
        raise CommandError(str(error)) from error


def _run(args: argparse.Namespace, settings: dict[str, Any], stdout: TextIO) -> int:
    _prepare_environment()
    arguments = _engine_arguments(args, settings)
    if not args.force and (found := _stored(args, arguments)) is not None:
        _say(args, stdout, found)
        return 0
    with _engine(arguments) as llm, _progress_bar() as progress:
        calibration = _calibrated(llm, progress)
    found = _judged(args, calibration)
    _say(args, stdout, found)
    for reason in calibration.left_out:
        print(f"vllm-pdmux calibrate: fused steps are left to be learned: {reason}", file=sys.stderr)
    for problem in found["refused"]:
        print(f"vllm-pdmux calibrate: not stored: {problem}", file=sys.stderr)
    if found["refused"] and args.out is not None:
        print(f"vllm-pdmux calibrate: --out {args.out} is not written either", file=sys.stderr)
    return EXIT_REFUSED if found["refused"] else 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The plugin's, inline: those of the file, with a policy for which every division is made. Raises ConfigError."""
    inline: dict[str, Any] = {} if args.config is None else {"config": str(Path(args.config).absolute())}
    # What else the file says of policies does not matter here, and must not contradict this one.
    inline |= {"enabled": True, "policy": "slo", "fixed_group": None, "calibration": "off", "lane": "threaded"}
    resolve(inline, os.environ)
    return inline


def _prepare_environment() -> None:
    """Set what vLLM reads from the environment; must come before its import."""
    from vllm_pdmux.demo.engine import quieten

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is driven step by step in this process
    quieten()


def _engine_arguments(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    # Options that change how long a step takes must be given as they will be to the engine that serves.
    return engine_arguments(args) | {
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "additional_config": {"pdmux": settings},
    }


def _stored(args: argparse.Namespace, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """What is stored for this engine, without starting it; None when nothing is."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pdmux.activation import settings_of
    from vllm_pdmux.calibration import cache
    from vllm_pdmux.calibration.identity import key_of

    with refusals(args.model):
        config = EngineArgs(**arguments).create_engine_config()
    key = key_of(config, settings_of(config))
    profile = cache.load(key, lambda text: print(f"vllm-pdmux calibrate: {text}", file=sys.stderr))
    if profile is None:
        return None
    path = cache.path_of(key)
    details = json.loads(path.read_text(encoding="utf-8"))
    details = {name: details[name] for name in ("errors", "samples") if name in details}
    if args.out is not None:
        cache.write(args.out, key, profile, details)
    return _answer(profile, str(path), details.get("errors", {}), cached=True, measured_s=0.0, refused=[])


def _calibrated(llm: Any, progress: Progress) -> Calibration:
    """A second time where the first one is refused: a host that is slow for some seconds spoils what it launches then,
    and the engine's start costs more than measuring."""
    from vllm_pdmux.calibration.fit import too_large
    from vllm_pdmux.calibration.run import calibrate

    first = calibrate(llm, progress)
    if not (problems := too_large(first.errors)):
        return first
    print(f"vllm-pdmux calibrate: measuring once more: {'; '.join(problems)}", file=sys.stderr)
    return calibrate(llm, progress)


def _judged(args: argparse.Namespace, calibration: Calibration) -> dict[str, Any]:
    """Store it if it is good enough."""
    from vllm_pdmux.calibration import cache
    from vllm_pdmux.calibration.fit import too_large

    refused, path, details = too_large(calibration.errors), None, calibration.details()
    if not refused:
        path = str(cache.store(calibration.key, calibration.profile, details))
        if args.out is not None:
            cache.write(args.out, calibration.key, calibration.profile, details)
    return _answer(calibration.profile, path, details["errors"], False, details["measured_s"], refused)


def _answer(
    profile: Any, path: str | None, errors: Mapping[str, Any], cached: bool, measured_s: float, refused: list[str]
) -> dict[str, Any]:
    answer = {"stored": path, "cached": cached, "measured_s": measured_s, "errors": errors, "refused": refused}
    return answer | {"profile": profile.model_dump(mode="json")}


def _say(args: argparse.Namespace, stdout: TextIO, found: Mapping[str, Any]) -> None:
    if args.json:
        print(json.dumps(found), file=stdout)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("on points held out", "median", "95 % below", "points", title=found["profile"]["name"])
    for kind, error in found["errors"].items():
        table.add_row(kind, f"{error['median']:.1%}", f"{error['p95']:.1%}", str(error["points"]))
    Console(file=stdout, highlight=False).print(table)
    if found["cached"]:
        print(f"calibrated already (--force measures again): {found['stored']}", file=stdout)
    elif found["stored"]:
        print(f"measured in {found['measured_s']:.1f} s, stored in {found['stored']}", file=stdout)
    if found["stored"] and args.out is not None:
        print(f"and in {args.out}", file=stdout)


@contextmanager
def _engine(arguments: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM

    with refusals(arguments["model"]):
        llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("calibrating")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
