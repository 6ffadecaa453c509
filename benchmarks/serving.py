# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of a shape with made-up weights, and requests that reach it as in a service, through its HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import openai
import shapes
from arrivals import Request, Seen, summary
from tokenizers import Tokenizer, models

READY_S, STOP_S = 600.0, 60.0
LEAD_S = 3.0  # for clients to get ready, before the first request may be due
LOG_SHOWN = 3000  # characters of a log
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
                said = log.read_text(errors="replace")[-LOG_SHOWN:]
                raise RuntimeError(f"the server is not ready (exit status {process.poll()}), it said last:\n{said}")
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


class Clients:
    """Processes that send requests and read their streams, so that a client is never what a token waits for."""

    def __init__(self, processes: int):
        self._processes = processes
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(processes)
        self._pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(together,))
        # All of them are there, with what they import, before the first request: one task each, since none ends alone.
        for future in [self._pool.submit(int) for _ in range(processes)]:
            future.result()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def serve(
        self, address: str, requests: list[Request], vocabulary: int, limit_s: float, salt: str
    ) -> dict[str, Any]:
        """Send each request when it is due and read its stream; what the clients saw, as `arrivals.serve` has it.

        After `limit_s` what is still open is closed, and counts as not answered. Runs of another `salt` share no
        prefixes. Raises RuntimeError when a client is ready too late.
        """
        numbered = list(enumerate(requests))
        start_s = time.perf_counter() + LEAD_S  # the clock of all processes of a machine
        shares = [numbered[place :: self._processes] for place in range(self._processes)]
        futures = [self._pool.submit(_served, address, one, vocabulary, start_s, limit_s, salt) for one in shares]
        seen: dict[int, Seen] = {}
        errors: list[str] = []
        for future in futures:
            its_seen, its_errors = future.result()
            seen |= its_seen
            errors += its_errors
        took_s = time.perf_counter() - start_s
        return {**summary(requests, [seen[number] for number, _ in numbered]), "took_s": took_s, "errors": errors[:3]}


def _begin(together: Barrier) -> None:
    """Wait for the other processes of a pool."""
    together.wait(READY_S)


def _served(
    address: str, requests: list[tuple[int, Request]], vocabulary: int, start_s: float, limit_s: float, salt: str
) -> tuple[dict[int, Seen], list[str]]:
    """In a process of the pool: what was seen of each of `requests`, by number, and what went wrong."""
    return asyncio.run(_all_served(address, requests, vocabulary, start_s, limit_s, salt))


async def _all_served(
    address: str, requests: list[tuple[int, Request]], vocabulary: int, start_s: float, limit_s: float, salt: str
) -> tuple[dict[int, Seen], list[str]]:
    prompts = [request.prompt(number, vocabulary) for number, request in requests]
    seen = {number: Seen() for number, _ in requests}
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=limit_s) as client:
        if (late_s := time.perf_counter() - start_s) > 0:
            raise RuntimeError(f"a client was ready {late_s:.1f} s too late: raise LEAD_S ({LEAD_S:g})")
        await asyncio.sleep(-late_s)
        streams = [
            asyncio.create_task(_stream(client, salt, start_s, request, prompt, seen[number]))
            for (number, request), prompt in zip(requests, prompts, strict=True)
        ]
        if not streams:
            return {}, []
        _, late = await asyncio.wait(streams, timeout=limit_s)
        for task in late:
            task.cancel()
        found = await asyncio.gather(*streams, return_exceptions=True)
    return seen, [repr(one) for one in found if isinstance(one, Exception)]


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
