# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a process, and clients that read streams from it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from process_helpers import HANG_LIMIT_S, environment


class Server:
    """A server of `model` with these arguments; `log` is a file for what it prints, `environ` added to its own."""

    script = Path(__file__).with_name("vllm_cli.py")

    def __init__(self, log: Path, model: str, arguments: Sequence[str], **environ: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.model = log, model
        command = [
            *(sys.executable, str(self.script), "serve", model),
            *("--host", "127.0.0.1", "--port", str(self.port), *arguments),
        ]
        env = environment(**environ)
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=HANG_LIMIT_S) as reply:
            return reply.read().decode()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + HANG_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("health")
                return
            time.sleep(0.5)
        pytest.fail(f"the server is not ready, exit status {self.process.poll()}:\n{self.log.read_text()}")

    def api(self, timeout_s: float = HANG_LIMIT_S) -> openai.OpenAI:
        """A client, which tries nothing again."""
        address = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=timeout_s)

    def value(self, name: str) -> float:
        """Of a metric of vLLM's, of all engines together."""
        samples = [line for line in self.get("metrics").splitlines() if line.startswith(f"vllm:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def num_running(self) -> float:
        return self.value("num_requests_running")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *self.descendants()]

    def kill(self) -> None:
        if self.process.poll() is None:
            for child in self.descendants():
                child.kill()
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def serving(log: Path, model: str, arguments: Sequence[str], **environ: str) -> Iterator[Server]:
    """A server that is ready, and killed afterwards if it still runs."""
    server = Server(log, model, arguments, **environ)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


class Chat(threading.Thread):
    """One streaming client. Two of different `salt` share no prefix cache; `extra`: more fields of the request.

    It leaves when nothing has come for `timeout_s`. `engine`: the one of several that is to serve it.
    """

    def __init__(
        self,
        server: Server,
        prompt: str,
        max_tokens: int,
        salt: str,
        timeout_s: float = HANG_LIMIT_S,
        engine: int | None = None,
        **extra: Any,
    ):
        super().__init__(daemon=True)
        self.client = server.api(timeout_s)
        self.request = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "cache_salt": salt, **extra},
            "extra_headers": {} if engine is None else {"X-data-parallel-rank": str(engine)},
        }
        self.pieces: list[str] = []
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self.client.chat.completions.create(stream=True, **self.request):
                self.finish_reason = chunk.choices[0].finish_reason
                if chunk.choices[0].delta.content:
                    self.pieces.append(chunk.choices[0].delta.content)
        except Exception as error:  # noqa: BLE001 - for the test to report
            self.error = error

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG_LIMIT_S
        while not condition():
            assert self.is_alive() and time.monotonic() < deadline, f"the stream ended early: {self.error}"
            time.sleep(0.01)

    def text(self) -> str:
        self.join(HANG_LIMIT_S)
        assert not self.is_alive() and self.error is None, self.error
        assert self.finish_reason == "length"
        return "".join(self.pieces)


def still_alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; one that ended and is waited for by nobody has ended."""
    deadline = time.monotonic() + 30
    while True:
        alive = [process for process in processes if process.is_running() and not is_zombie(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
