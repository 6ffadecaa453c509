# SPDX-License-Identifier: Apache-2.0
"""The command line `vllm-pdmux COMMAND …`.

A command is a module with NAME, HELP, add_arguments(parser) and run(args) -> exit code, listed in `COMMANDS`. Only the
module of the command that is used is imported, so that one command's needs (vLLM, a GPU) are not those of another.

`--debug` belongs to all of them and stands here alone: whatever goes wrong is one line on stderr without it, and comes
with its traceback with it.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from vllm_pdmux import __version__
from vllm_pdmux.config_errors import one_line

COMMANDS = {
    "plan": "vllm_pdmux.cli.plan",
    "config": "vllm_pdmux.cli.config",
    "demo": "vllm_pdmux.cli.demo",
    "verify": "vllm_pdmux.cli.verify",
    "calibrate": "vllm_pdmux.cli.calibrate",
    "doctor": "vllm_pdmux.cli.doctor",
    "simulate": "vllm_pdmux.cli.simulate",
}
PROGRAM = "vllm-pdmux"
DEBUG = "--debug"
EXIT_BAD_INPUT = 2
EXIT_UNEXPECTED = 3
EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 1  # as rich ends a program whose tables nobody reads
_LONGEST_REASON = 1000  # characters of an error that no command foresaw: some hold a whole configuration


class CommandError(Exception):
    """Bad input from the user. `main` prints it as one line on stderr, without a traceback, and returns 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad arguments or files, 3 an error that the command did not
    foresee, 130 interrupted, 1 when nobody reads the output any more; other codes are the command's own.

    `--help` prints and raises SystemExit(0), as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # No option before the command has a value.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    chosen = chosen if chosen in COMMANDS else None
    try:
        args = _parser(chosen).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except CommandError as error:
        return _failed(argv, chosen, str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _failed(argv, chosen, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again where it ends
        return EXIT_READER_LEFT
    except Exception as error:  # noqa: BLE001 - the last handler: a traceback is for --debug
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        return _failed(argv, chosen, f"{reason} (not foreseen; --debug shows where)", EXIT_UNEXPECTED)


def _failed(argv: Sequence[str], chosen: str | None, reason: str, code: int) -> int:
    """Called where an exception is handled: one line, after its traceback with --debug."""
    # Looked for here, since the arguments may be what could not be read.
    if DEBUG in argv:
        traceback.print_exc()
    print(one_line(f"{PROGRAM} {chosen or ''}".rstrip() + f": {reason}"), file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    command = ""  # that was chosen; argparse has the program itself say what none of its parsers knows

    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage before the message: a bad argument is worth one line.
        raise CommandError(f"{message} (see {f'{self.prog} {self.command}'.rstrip()} --help)")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of the chosen command; without one, with the help line of each."""
    parser = _Parser(prog=PROGRAM, description="PD-multiplexing for vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    _add_debug(parser, default=False)
    parser.command = chosen or ""
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
        _add_debug(subparser, default=argparse.SUPPRESS)  # else it would overwrite one given before the command
        if chosen:
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def _add_debug(parser: argparse.ArgumentParser, default: object) -> None:
    help_text = "show the traceback of an error, and what an engine's process has printed"
    parser.add_argument(DEBUG, action="store_true", default=default, help=help_text)
