# SPDX-License-Identifier: Apache-2.0
"""A real server and real clients: answers stream while a long prompt is prefilled, and SIGTERM ends all of it."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from process_helpers import HANG_LIMIT_S, environment, model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS, LAYERS_PER_GROUP = 30, 2
QUESTIONS = ("Tell me a story about a dog.", "Why is the sky blue?", "Write a letter to a friend.")
LONG_PROMPT = " ".join(f"Ship {number} carries {number * 7 % 50} boxes." for number in range(150)) + " Which is full?"
EXIT_STATUS_OF_STOCK = 0  # what a server without the plugin gives after SIGTERM, while it drains or aborts
DRAIN_S = 240


class Server:
    def __init__(self, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [
            *(sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "serve", model()),
            *("--scheduler-cls", "vllm_pdmux.Scheduler"),
            *("--additional-config", json.dumps({"pdmux": {"layers_per_group": LAYERS_PER_GROUP}})),
            *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"),  # no near ties between tokens
            *("--host", "127.0.0.1", "--port", str(self.port), "--shutdown-timeout", str(DRAIN_S)),
        ]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=HANG_LIMIT_S) as reply:
            return reply.read().decode()

    def wait_until_ready(self):
        deadline = time.monotonic() + HANG_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("health")
                return
            time.sleep(0.5)
        pytest.fail(f"the server is not ready, exit status {self.process.poll()}:\n{self.log.read_text()}")

    def num_running(self):
        samples = [line for line in self.get("metrics").splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def descendants(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self):
        if self.process.poll() is None:
            for child in self.descendants():
                child.kill()
            self.process.kill()
            self.process.wait()


class Chat(threading.Thread):
    """One streaming client. Two of different `salt` share no prefix cache."""

    def __init__(self, server, prompt, max_tokens, salt):
        super().__init__(daemon=True)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0,
                                    timeout=HANG_LIMIT_S)
        self.request = {
            "model": model(),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "cache_salt": salt},
        }
        self.pieces = []
        self.error = None
        self.finish_reason = None
        self.start()

    def run(self):
        try:
            for chunk in self.client.chat.completions.create(stream=True, **self.request):
                self.finish_reason = chunk.choices[0].finish_reason
                if chunk.choices[0].delta.content:
                    self.pieces.append(chunk.choices[0].delta.content)
        except Exception as error:  # noqa: BLE001 - for the test to report
            self.error = error

    def wait_until(self, condition):
        deadline = time.monotonic() + HANG_LIMIT_S
        while not condition():
            assert self.is_alive() and time.monotonic() < deadline, f"the stream ended early: {self.error}"
            time.sleep(0.01)

    def text(self):
        self.join(HANG_LIMIT_S)
        assert not self.is_alive() and self.error is None, self.error
        assert self.finish_reason == "length"
        return "".join(self.pieces)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def log_of_a_failure(server, request):
    """pytest prints what was printed before a failure: the server's last lines."""
    yield
    print(server.log.read_text()[-8000:])


def all_streaming(server, salt, max_tokens):
    """Clients that have all got their first words."""
    chats = [Chat(server, question, max_tokens, salt) for question in QUESTIONS]
    for chat in chats:
        chat.wait_until(lambda chat=chat: len(chat.pieces) >= 3)
    return chats


@dataclass
class Together:
    gained: list[int]  # pieces of each running answer between the arrival of the long prompt and its first piece
    texts: list[str]


@pytest.fixture(scope="module")
def together(server):
    """Three answers are streaming when a client comes with a long prompt."""
    chats = all_streaming(server, "together", 60)
    before = [len(chat.pieces) for chat in chats]
    long = Chat(server, LONG_PROMPT, 8, "together")
    long.wait_until(lambda: long.pieces)
    gained = [len(chat.pieces) - count for chat, count in zip(chats, before)]
    return Together(gained, [chat.text() for chat in (*chats, long)])


@pytest.fixture(scope="module")
def alone(server):
    """The same requests one after the other: each is stock vLLM's prefill, then stock vLLM's decode."""
    prompts = zip((*QUESTIONS, LONG_PROMPT), (60, 60, 60, 8))
    return [Chat(server, prompt, max_tokens, "alone").text() for prompt, max_tokens in prompts]


def test_one_client_streams_an_answer(server):
    chat = Chat(server, "Hello!", 16, "one")
    assert chat.text() and len(chat.pieces) > 8


def test_running_answers_go_on_while_a_long_prompt_is_prefilled(together):
    """A stock step would prefill this prompt at once; here each layer group lets every running answer have a token."""
    assert min(together.gained) >= LAYERS // LAYERS_PER_GROUP // 2, together.gained


def test_the_texts_of_clients_at_once_are_those_of_each_alone(together, alone):
    assert together.texts == alone


def test_sigterm_in_mid_prefill_finishes_what_runs_and_leaves_no_process(server, alone):
    """The last test of this server."""
    chats = all_streaming(server, "sigterm", 60)
    long = Chat(server, LONG_PROMPT, 8, "sigterm")
    long.wait_until(lambda: server.num_running() == len(chats) + 1)
    assert not long.pieces, "its prefill is over"
    family = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_LIMIT_S) == EXIT_STATUS_OF_STOCK
    assert [chat.text() for chat in (*chats, long)] == alone
    assert still_alive(family) == []


def still_alive(processes):
    """Those that do not end; one that ended and is waited for by nobody has ended."""
    deadline = time.monotonic() + 30
    while True:
        alive = [process for process in processes if process.is_running() and not is_zombie(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def is_zombie(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
