# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux config`: the settings in force, where each came from, and their JSON schema. Needs no GPU and no vLLM."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from vllm_pdmux.cli import CommandError
from vllm_pdmux.config import DEFAULT_ORIGIN, ENVIRONMENT_VARIABLE, ConfigError, PDMuxConfig, Resolved, resolve
from vllm_pdmux.switch import is_on

NAME = "config"
HELP = "Show every setting with its value and where that is from, or the JSON schema of the settings."

_DIALECT = "https://json-schema.org/draft/2020-12/schema"  # the one that pydantic writes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `config`."""
    parser.add_argument("--file", "--config", help=f"configuration file; over the one named by {ENVIRONMENT_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the settings, for an editor")


def run(args: argparse.Namespace) -> int:
    """Print the settings, or their schema: 0. Raises CommandError for a file that is wrong."""
    if args.schema:
        if args.file is not None:
            raise CommandError(f"--schema is of every file, but --file is {args.file!r}: leave one of the two out")
        print(json.dumps(schema(), indent=2))
        return 0
    try:
        resolved = resolve(None if args.file is None else {"config": args.file}, os.environ)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps({"settings": settings(resolved)}))
    else:
        _print(resolved)
    return 0


def schema() -> dict[str, Any]:
    """The JSON schema of a file, and of the settings inline but for their key `config`."""
    return {"$schema": _DIALECT, **PDMuxConfig.model_json_schema()}


def settings(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """By name: the value, as in a file, and its origin."""
    values = resolved.config.model_dump(mode="json")
    return {name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()}


def _print(resolved: Resolved) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("setting", Column("value", overflow="fold"), Column("from", overflow="fold"))
    for name, row in settings(resolved).items():
        style = "dim" if row["origin"] == DEFAULT_ORIGIN else ""
        value = "not set" if row["value"] is None else json.dumps(row["value"])
        # As Text: a path may look like rich's markup.
        table.add_row(name, Text(value), Text(row["origin"]), style=style)
    Console(highlight=False).print(table)
    print(_asked())


def _asked() -> str:
    """Whether the settings are in use: `enabled` alone does not say it."""
    try:
        is_asked = is_on(os.environ)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if is_asked:
        return f"PDMUX={os.environ['PDMUX']} asks for the plugin."
    return 'They hold where the plugin is asked for: --scheduler-cls, PDMUX=1 or additional_config["pdmux"].'
