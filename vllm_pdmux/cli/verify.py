# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux verify`: are the tokens stock vLLM's with this model on this machine, and what do requests wait for?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.engine_options import add_engine_options, check_engine, given_options
from vllm_pdmux.cli.numbers import positive
from vllm_pdmux.config import DEFAULT_ORIGIN, ConfigError, Resolved, resolve
from vllm_pdmux.verify import VerifyError

if TYPE_CHECKING:
    from vllm_pdmux.verify.report import Result

NAME = "verify"
HELP = "Serve the same prompts with stock vLLM and with the plugin on this machine: are the tokens equal, and how fast?"

EXIT_DIFFERENT = 1
# A lane that hangs would keep the command waiting for ever.
_WATCHDOG = {"watchdog_s": 120, "watchdog_action": "exit"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verify`."""
    parser.add_argument("--model", required=True, help="folder or name of the model, as for vLLM")
    parser.add_argument("--config", help="configuration file of the plugin (default: PDMUX_CONFIG)")
    add_engine_options(parser)
    parser.add_argument("--chats", type=positive(int), default=4, help="requests that stream (default: 4)")
    parser.add_argument("--max-tokens", type=positive(int), default=96, help="tokens of their answers (default: 96)")
    parser.add_argument(
        "--document-tokens", type=positive(int), default=1500, help="of the long prompt, at most (default: 1500)"
    )
    parser.add_argument("--rounds", type=positive(int), default=3, help="in which latencies are taken (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Both engines, one after the other: 0 when the tokens are equal, else 1.

    Raises CommandError when it cannot run as asked.
    """
    try:
        settings, resolved = _settings(args)
        check_engine(args.model)
        result = _verified(args, settings, resolved)
    except (ConfigError, VerifyError) as error:
        raise CommandError(str(error)) from error
    _say(args, result)
    if result.failure is None:
        return 0
    print(f"vllm-pdmux verify: failed: {result.failure}", file=sys.stderr)
    return EXIT_DIFFERENT


def _settings(args: argparse.Namespace) -> tuple[dict[str, Any], Resolved]:
    """The plugin's, inline, and what they come to. Raises ConfigError."""
    inline: dict[str, Any] = {} if args.config is None else {"config": str(Path(args.config).absolute())}
    given = resolve(inline | {"enabled": True}, os.environ)
    if given.config.watchdog_s:  # 0: the user wants no watchdog
        inline |= {name: value for name, value in _WATCHDOG.items() if given.origins[name] == DEFAULT_ORIGIN}
    return inline, resolve(inline | {"enabled": True}, os.environ)


def _verified(args: argparse.Namespace, settings: dict[str, Any], resolved: Resolved) -> Result:
    from vllm_pdmux.verify.processes import serve
    from vllm_pdmux.verify.report import Result

    arguments = given_options(args)
    sizes = {name: getattr(args, name) for name in ("chats", "max_tokens", "document_tokens", "rounds")}
    spec = {"arguments": arguments, "pdmux": settings, **sizes}
    print("vllm-pdmux verify: stock vLLM starts and serves", file=sys.stderr)
    stock = serve(spec, with_pdmux=False, show_output=args.debug)
    if stock.error is not None:
        raise VerifyError(f"stock vLLM cannot serve the prompts, so there is nothing to compare with: {stock.error}")
    print("vllm-pdmux verify: so does the plugin", file=sys.stderr)
    pdmux = serve(spec, with_pdmux=True, show_output=args.debug)
    return Result(arguments, resolved, stock, pdmux)


def _say(args: argparse.Namespace, result: Result) -> None:
    if args.json:
        print(json.dumps(result.as_json()))
        return
    from rich.console import Console
    from rich.table import Table

    from vllm_pdmux.verify.report import block, outcome, rows

    table = Table("", "stock vLLM", "with the plugin")
    for row in rows(result):
        table.add_row(*row)
    Console(highlight=False).print(table)
    for line in outcome(result):
        print(line)
    print("\nFor a bug report:\n\n```")
    for line in block(result):
        print(line)
    print("```")
