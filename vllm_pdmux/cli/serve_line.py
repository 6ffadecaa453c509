# SPDX-License-Identifier: Apache-2.0
"""What follows `vllm serve` on a command line, read by vLLM's own parser. Imports vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.engine_options import check_model, refusals


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # the check does not follow vLLM
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"vllm serve does not take what follows --: {message}")


def engine_args_of(arguments: Sequence[str]) -> Any:
    """The engine's arguments of `vllm serve ARGUMENTS`, a file of its `--config` included. The command itself may
    stand before them.

    Raises CommandError for a line or a model that vLLM refuses.
    """
    for written in (["vllm", "serve"], ["-m", "vllm.entrypoints.openai.api_server"]):
        first = 1 if written[0] == "-m" else 0  # some python
        if list(arguments[first : first + 2]) == written:
            arguments = arguments[first + 2 :]
    command = ServeSubcommand()
    parser = _Parser(prog="vllm")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    try:
        parsed = parser.parse_args([command.name, *arguments])
        command.validate(parsed)
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(f"vllm serve does not take what follows --: {error}") from error
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    elif parsed.model == EngineArgs.model:
        raise CommandError(f"what follows -- names no model, and vLLM would serve {parsed.model}: put MODEL first")
    check_model(parsed.model)
    with refusals(parsed.model):
        return EngineArgs.from_cli_args(parsed)
