# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of a shape with made-up weights, and requests that reach it as in a service, through its HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import shapes
from arrivals import Request, Seen, summary
from tokenizers import Tokenizer, models

READY_S, STOP_S = 600.0, 60.0
NAME = "shape"  # of the model, for clients


def server_arguments(arm: str) -> list[str]:
    """Of `vllm serve`, for an arm: ``stock [OPTIONS]``, or ``pdmux JSON [OPTIONS]`` with the plugin's settings.

    Raises ValueError for what is neither.
    """
    kind, _, rest = arm.partition(" ")
    if kind == "stock":
        return shlex.split(rest)
    if kind != "pdmux":
        raise ValueError(f"--arm is {arm!r} but must be 'stock [OPTIONS]' or 'pdmux JSON [OPTIONS]'")
    try:
        settings, end = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        raise ValueError(f"--arm is {arm!r} but what follows pdmux must be its settings as JSON") from None
    plugin = ["--scheduler-cls", "vllm_pdmux.Scheduler", "--additional-config", json.dumps({"pdmux": settings})]
    return [*plugin, *shlex.split(rest[end:])]


def model(shape: str) -> str:
    """A folder with the shape's config and a tokenizer of as many made-up words, which a server needs for its texts."""
    folder = Path(shapes.arguments(shape)["model"])
    words = {f" w{number}": number for number in range(shapes.vocabulary(shape))}
    Tokenizer(models.WordLevel(words, unk_token=" w0")).save(str(folder / "tokenizer.json"))  # noqa: S106 - a token of text
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)


@contextlib.contextmanager
def serving(folder: str, arguments: Sequence[str], log: Path) -> Iterator[tuple[str, float]]:
    """(address, seconds until it was ready) of a server, which is ended afterwards. Raises RuntimeError when it is not
    ready in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--load-format", "dummy"]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), *arguments]
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - start > READY_S:
                raise RuntimeError(f"the server is not ready (exit status {process.poll()}), see {log}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    address = f"http://127.0.0.1:{port}/health"
    missing = contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError)
    with missing, urllib.request.urlopen(address, timeout=5):
        return True
    return False


def serve(address: str, requests: list[Request], vocabulary: int, limit_s: float, salt: str) -> dict[str, Any]:
    """Send each request when it is due and read its stream; what the clients saw, as `arrivals.serve` has it.

    After `limit_s` what is still open is closed, and counts as not answered. Runs of another `salt` share no prefixes.
    """
    return asyncio.run(_serve(address, requests, vocabulary, limit_s, salt))


async def _serve(address: str, requests: list[Request], vocabulary: int, limit_s: float, salt: str) -> dict[str, Any]:
    prompts = [request.prompt(number, vocabulary) for number, request in enumerate(requests)]
    seen = [Seen() for _ in requests]
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=limit_s) as client:
        start_s = time.perf_counter()
        clients = [
            asyncio.create_task(_stream(client, salt, start_s, *of_one))
            for of_one in zip(requests, prompts, seen, strict=True)
        ]
        _, late = await asyncio.wait(clients, timeout=limit_s)
        for task in late:
            task.cancel()
        found = await asyncio.gather(*clients, return_exceptions=True)
    errors = [repr(one) for one in found if isinstance(one, Exception)]
    return {**summary(requests, seen), "took_s": time.perf_counter() - start_s, "errors": errors[:3]}


async def _stream(client: Any, salt: str, start_s: float, request: Request, prompt: list[int], seen: Seen) -> None:
    await asyncio.sleep(max(0.0, request.at_ms / 1e3 - (time.perf_counter() - start_s)))
    stream = await client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=request.answer_tokens,
        temperature=0,
        stream=True,
        # So that each piece says how many tokens there are by now.
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True, "cache_salt": salt},
    )
    async for piece in stream:
        if piece.usage is not None:
            seen.token((time.perf_counter() - start_s) * 1e3, piece.usage.completion_tokens)
