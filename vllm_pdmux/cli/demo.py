# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux demo`: chats stream while a document is prefilled, with stock vLLM, also in small chunks, and with the
plugin, side by side."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.stdout import own_stdout
from vllm_pdmux.demo import DemoError

if TYPE_CHECKING:
    from vllm_pdmux.demo.comparison import Comparison, Facts
    from vllm_pdmux.demo.drive import Run
    from vllm_pdmux.demo.engine import EngineOptions
    from vllm_pdmux.demo.picture import Silent
    from vllm_pdmux.demo.workload import Workload

NAME = "demo"
HELP = "Stream chats while a long document is prefilled, with stock vLLM and with the plugin, and compare them."

DTYPES = ("auto", "float32", "bfloat16", "float16")
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MOST = 10**6
_MOST_CHATS = 64
_SMALLEST_CHUNK = 2 * _MOST_CHATS  # with each chat in it, and something of the document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--model", help="folder of a model of Hugging Face's format (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no picture")
    parser.add_argument(
        "--layers-per-group", type=_integer(1), help="layers between two decode steps (default: an eighth of them)"
    )
    parser.add_argument(
        "--document-tokens", type=_integer(1), default=1500, help="tokens of the document's prompt (default: 1500)"
    )
    parser.add_argument("--chats", type=_integer(1, _MOST_CHATS), default=4, help="requests that stream (default: 4)")
    parser.add_argument("--max-tokens", type=_integer(2), default=48, help="tokens of an answer (default: 48)")
    parser.add_argument(
        "--chunk-tokens",
        type=_integer(_SMALLEST_CHUNK),
        default=256,
        help="tokens of a step of stock vLLM's second run, its max_num_batched_tokens (default: 256)",
    )
    parser.add_argument("--max-model-len", type=_integer(1), help="context of the engines (default: the model's)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default on a CPU: float32)")
    parser.add_argument("--compile", action="store_true", help="compile the model: the start takes longer")


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 when every text is stock's and decode steps ran beside the prefill, else 1.

    Raises CommandError when it cannot run as asked.
    """
    try:
        _check(args)
        with own_stdout() as stdout:
            comparison = _compare(args, stdout)
    except DemoError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if comparison.failure is None:
        return 0
    print(f"vllm-pdmux demo: failed: {comparison.failure}", file=sys.stderr)
    return EXIT_FAILED


def _check(args: argparse.Namespace) -> None:
    """What can be known before vLLM is imported."""
    from vllm_pdmux.demo.workload import check_length

    if importlib.util.find_spec("vllm") is None:
        raise DemoError(f"vLLM is not installed here: {sys.executable} -m pip install 'vllm-pdmux[cpu]'")
    if args.model is not None and not Path(args.model, "config.json").is_file():
        raise DemoError(f"--model is {args.model!r} but must be the folder of a model, with a config.json in it")
    if args.max_model_len is not None:
        check_length(args.document_tokens, args.max_tokens, args.max_model_len)


def _compare(args: argparse.Namespace, stdout: TextIO) -> "Comparison":
    """All runs, shown as they go; the JSON or the tables at the end."""
    from vllm_pdmux.demo.engine import prepare_environment
    from vllm_pdmux.demo.picture import Picture, Silent, console

    say = (lambda line: print(line, file=sys.stderr)) if args.json else console(stdout).print
    model = _model(args.model, say)
    prepare_environment()
    picture = Silent(say) if args.json else Picture(console(stdout))
    comparison = _runs(_options(args, model), args, picture)
    if args.json:
        print(json.dumps(comparison.as_json()), file=stdout)
    else:
        picture.show(comparison)
    return comparison


def _runs(options: "EngineOptions", args: argparse.Namespace, picture: "Silent") -> "Comparison":
    from vllm_pdmux.demo.comparison import Comparison
    from vllm_pdmux.demo.engine import running_engine
    from vllm_pdmux.demo.picture import PDMUX, STOCK, chunked_name

    picture.loading(STOCK)
    with running_engine(options, with_pdmux=False) as llm:
        workload = _workload(llm, args)
        facts = _facts(llm, workload, options, args.chunk_tokens)
        stock = _measured(llm, workload, facts, picture, STOCK)
    name = chunked_name(args.chunk_tokens)
    picture.loading(name)
    with running_engine(options, with_pdmux=False, chunk_tokens=args.chunk_tokens) as llm:
        chunked = _measured(llm, workload, facts, picture, name)
    picture.loading(PDMUX)
    with running_engine(options, with_pdmux=True) as llm:
        pdmux = _measured(llm, workload, facts, picture, PDMUX)
    return Comparison(facts, stock, chunked, pdmux)


def _measured(llm: Any, workload: "Workload", facts: "Facts", picture: "Silent", name: str) -> "Run":
    from vllm_pdmux.demo.drive import drive

    drive(llm, workload.warm_up())
    with picture.watching(name, workload, facts.layers) as watch:
        run = drive(llm, workload, watch)
    picture.ran(name, run)
    return run


def _workload(llm: Any, args: argparse.Namespace) -> "Workload":
    from vllm_pdmux.demo.workload import build, check_length, encoder

    workload = build(encoder(llm.get_tokenizer()), args.chats, args.document_tokens, args.max_tokens)
    longest = max(len(prompt.token_ids) for prompt in workload.prompts)
    check_length(longest, args.max_tokens, llm.llm_engine.model_config.max_model_len)
    return workload


def _facts(llm: Any, workload: "Workload", options: "EngineOptions", chunk_tokens: int) -> "Facts":
    from vllm.platforms import current_platform

    from vllm_pdmux.activation import metadata_version
    from vllm_pdmux.demo.comparison import Facts
    from vllm_pdmux.demo.contention import usable_cpus
    from vllm_pdmux.demo.engine import layers_of

    return Facts(
        model=options.model,
        dtype=str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        vllm=" ".join(metadata_version()),
        device=current_platform.device_name,
        cpus=usable_cpus(),
        layers=layers_of(llm),
        chats=len(workload.chats),
        document_tokens=len(workload.document.token_ids),
        max_tokens=workload.max_tokens,
        chunk_tokens=chunk_tokens,
    )


def _options(args: argparse.Namespace, model: str) -> "EngineOptions":
    from vllm_pdmux.demo.engine import EngineOptions

    most_requests = _MOST_CHATS + 1
    return EngineOptions(model, args.max_model_len, args.dtype, args.compile, args.layers_per_group, most_requests)


def _model(folder: str | None, say: Callable[[str], None]) -> str:
    """The folder of the model, made if it is the demo's own."""
    from vllm_pdmux.demo_model import ModelMissing, ensure_model

    if folder is not None:
        return folder
    try:
        return str(ensure_model(say))
    except ModelMissing as error:
        raise DemoError(str(error)) from error


def _integer(least: int, most: int = _MOST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"is {text!r} but must be an integer from {least} to {most}")
        return int(text)

    return parse
