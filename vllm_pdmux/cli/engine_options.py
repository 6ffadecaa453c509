# SPDX-License-Identifier: Apache-2.0
"""The options of commands that start an engine: vLLM's own, by the names of its engine arguments."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.numbers import positive

_OPTIONS = (
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "hf_overrides", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes"),
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Declare them; `--model` is left to the command."""
    parser.add_argument("--dtype", help="as for vLLM, and so are the following")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--load-format", help="dummy: made-up weights, which take as long")
    parser.add_argument("--hf-overrides", type=_mapping, help="JSON object")
    parser.add_argument("--max-model-len", type=positive(int))
    parser.add_argument("--max-num-seqs", type=positive(int))
    parser.add_argument("--max-num-batched-tokens", type=positive(int))
    parser.add_argument("--gpu-memory-utilization", type=positive(float))
    parser.add_argument("--kv-cache-memory-bytes", type=positive(int))
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments that the user gave, the model among them. Plain values, which JSON keeps."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    flags = {"enforce_eager": args.enforce_eager, "trust_remote_code": args.trust_remote_code}
    return {"model": args.model} | given | flags


def options_given(args: argparse.Namespace) -> bool:
    """Whether the user gave any of them, or a model."""
    return any(value not in (None, False) for value in given_options(args).values())


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The same, with what a platform needs for an engine in this process. Imports vLLM."""
    from vllm.platforms import current_platform

    return given_options(args) | ({"distributed_executor_backend": "uni"} if current_platform.is_cpu() else {})


def engine_args_of_options(args: argparse.Namespace) -> Any:
    """vLLM's EngineArgs of them. Imports vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_arguments(args))


def check_engine(model: str) -> None:
    """What can be known before vLLM is imported, which takes seconds. Raises CommandError."""
    check_installed()
    check_model(model)


def check_installed() -> None:
    """CommandError where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise CommandError(f"vLLM is not installed here: {sys.executable} -m pip install 'vllm-pdmux[cpu]'")


def check_model(model: str) -> None:
    """CommandError for a path that is no model's folder. What may be a name (`owner/name`) is left to vLLM."""
    folder = Path(model).expanduser()
    is_path = folder.exists() or model.startswith((os.sep, ".", "~")) or model.count("/") > 1 or not model.strip()
    if is_path and not (folder / "config.json").is_file() and folder.suffix != ".gguf":
        raise CommandError(
            f"vLLM does not start with {model}: it is no folder with a config.json in it, and no model's name: "
            "correct --model"
        )


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """What vLLM or the plugin refuses, as one line: CommandError."""
    from vllm_pdmux.demo.engine import reason_of

    try:
        yield
    except (ValueError, OSError) as error:
        raise CommandError(f"vLLM does not start with {model}: {reason_of(error)}") from error


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'is {text!r} but must be a JSON object, such as {{"num_hidden_layers": 4}}')
    return value
