# SPDX-License-Identifier: Apache-2.0
"""The command line `vllm-pdmux COMMAND …`.

A command is a module with NAME, HELP, add_arguments(parser) and run(args) -> exit code, listed in `COMMANDS`. Only the
module of the command that is used is imported, so that one command's needs (vLLM, a GPU) are not those of another.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from vllm_pdmux import __version__
from vllm_pdmux.config_errors import one_line

COMMANDS = {
    "plan": "vllm_pdmux.cli.plan",
    "demo": "vllm_pdmux.cli.demo",
    "calibrate": "vllm_pdmux.cli.calibrate",
    "doctor": "vllm_pdmux.cli.doctor",
    "simulate": "vllm_pdmux.cli.simulate",
}
PROGRAM = "vllm-pdmux"
EXIT_BAD_INPUT = 2


class CommandError(Exception):
    """Bad input from the user. `main` prints it as one line on stderr, without a traceback, and returns 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad arguments or files; other codes are the command's own.

    `--help` prints and raises SystemExit(0), as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        args = _parser(chosen).parse_args(argv)
        return args.run(args)
    except CommandError as error:
        print(one_line(f"{PROGRAM} {chosen or ''}".rstrip() + f": {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage before the message: a bad argument is worth one line.
        raise CommandError(f"{message} (see {self.prog} --help)")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of the chosen command; without one, with the help line of each."""
    parser = _Parser(prog=PROGRAM, description="PD-multiplexing for vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [chosen] if chosen else COMMANDS:
        try:
            command = import_module(COMMANDS[name])
        except ImportError as error:
            if chosen:
                raise CommandError(f"not available here ({error}): install what it needs") from error
            commands.add_parser(name, help=f"not available here ({error})")  # the other commands still have their help
            continue
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        if chosen:
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser
