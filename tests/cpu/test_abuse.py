# SPDX-License-Identifier: Apache-2.0
"""A real server with too little KV cache and 64 clients who ask for anything, change their minds and send nonsense.

PDMUX_ABUSE_S: for how many seconds (default: 40). Whatever they do, progress never stops, an answer that is whole is
the one that the same prompt has alone, memory, threads and file handles do not grow, and SIGTERM ends it.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter

import openai
import psutil
import pytest
from metrics_page import Page
from process_helpers import HANG_LIMIT_S
from server import serving, still_alive

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = float(os.environ.get("PDMUX_ABUSE_S", "40"))
CLIENTS, LIMIT_TOKENS, BLOCKS = 64, 512, 56  # of 32 tokens: three of the longest requests
STALL_S = 60.0  # without a token for anybody: a hang
KNOWN = 24  # prompts whose answers are known
RSS_GROWTH_MIB = 150  # between the first half and the end
ARGUMENTS = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler"),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 2}})),
    *("--max-model-len", str(LIMIT_TOKENS), "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "256", "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)),
)
NONSENSE = (
    {"prompt": [3] * (LIMIT_TOKENS + 200), "max_tokens": 5},
    {"prompt": [3, 4], "max_tokens": -1},
    {"prompt": [3, 4], "max_tokens": LIMIT_TOKENS * 2},
    {"prompt": [3, 4], "temperature": -3.0},
    {"prompt": [], "max_tokens": 4},
    {"prompt": [3, 4], "n": 0},
)


class Client(threading.Thread):
    """One of many, who goes on until `until`."""

    def __init__(self, server, number, known, until):
        super().__init__(daemon=True)
        self.random = random.Random(number)
        self.api = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=HANG_LIMIT_S
        )
        self.model, self.known, self.until = server.model, known, until
        self.done, self.problems = Counter(), []
        self.last_s = time.monotonic()
        self.start()

    def run(self):
        while time.monotonic() < self.until:
            what = self.random.choices((self.asks, self.leaves, self.talks_nonsense), (6, 3, 1))[0]
            try:
                what()
            except Exception as error:  # noqa: BLE001 - the test reports it
                self.problems.append(f"{what.__name__}: {type(error).__name__}: {error}")
                return
            self.done[what.__name__] += 1
            self.last_s = time.monotonic()

    def asks(self):
        """For an answer that is known, whole."""
        tokens, expected = self.random.choice(self.known)
        text = ask(self.api, self.model, tokens, len_of(tokens)).choices[0].text
        if text != expected:
            self.problems.append(f"a wrong answer to a prompt of {len(tokens)} tokens")

    def leaves(self):
        """In the middle of an answer, or before it."""
        tokens = self.random.choices(range(3, 90), k=self.random.randint(1, LIMIT_TOKENS - 60))
        stream = self.api.completions.create(
            model=self.model, prompt=tokens, max_tokens=self.random.choice((1, 10, 60)), stream=True, temperature=0
        )
        with contextlib.closing(stream):
            for _, _ in zip(range(self.random.choice((0, 1, 4))), stream, strict=False):
                self.last_s = time.monotonic()

    def talks_nonsense(self):
        with contextlib.suppress(openai.BadRequestError):
            self.api.completions.create(model=self.model, **self.random.choice(NONSENSE))
            raise AssertionError("nonsense was answered")


def len_of(tokens):
    """Of an answer; 1 among them."""
    return 1 + len(tokens) % 40 * 4


def ask(api, model, tokens, max_tokens):
    extra = {"ignore_eos": True}
    return api.completions.create(
        model=model, prompt=tokens, max_tokens=max_tokens, temperature=0, extra_body=extra, stream=False
    )


def use_of(processes):
    """(RSS in MiB, threads, file handles) of all of them."""
    alive = [process for process in processes if process.is_running()]
    return (
        sum(process.memory_info().rss for process in alive) / 2**20,
        sum(process.num_threads() for process in alive),
        sum(process.num_fds() for process in alive),
    )


def test_whatever_clients_do(tmp_path, tiny_model_path):
    with serving(tmp_path / "log", tiny_model_path, ARGUMENTS) as server:
        family = [psutil.Process(server.process.pid), *server.descendants()]
        generator = random.Random(0)
        prompts = [generator.choices(range(3, 90), k=generator.randint(1, LIMIT_TOKENS - 160)) for _ in range(KNOWN)]
        prompts += [[*prompt[:200], 7] for prompt in prompts if len(prompt) > 200]  # prefixes are shared
        api = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=HANG_LIMIT_S)
        # One after the other: each is stock vLLM's prefill, then stock vLLM's decode.
        known = [(one, ask(api, server.model, one, len_of(one)).choices[0].text) for one in prompts]
        start = time.monotonic()
        clients = [Client(server, number, known, start + SECONDS) for number in range(CLIENTS)]
        middle = None
        while any(client.is_alive() for client in clients):
            time.sleep(0.5)
            now = time.monotonic()
            assert now - max(client.last_s for client in clients) < STALL_S, "nobody has had anything for long"
            if middle is None and now > start + SECONDS / 2:
                middle = use_of(family)
        end = use_of(family)
        problems = [problem for client in clients for problem in client.problems]
        assert not problems, problems[:5]
        done = sum((client.done for client in clients), Counter())
        assert min(done[kind] for kind in ("asks", "leaves", "talks_nonsense")) > 0 and done["asks"] > CLIENTS / 2
        page = Page(server.get("metrics"))
        assert page.of("prefill_batches_total", "ended") > 10 and page.of("prefill_batches_total", "failed") == 0
        preempted = sum(
            float(line.rpartition(" ")[2])
            for line in server.get("metrics").splitlines()
            if line.startswith("vllm:num_preemptions_total{")
        )
        assert preempted > 0, "the KV cache was large enough"
        assert server.num_running() == 0
        assert end[0] < middle[0] + RSS_GROWTH_MIB, (middle, end)
        assert end[1] <= middle[1] + 4 and end[2] <= middle[2] + CLIENTS, (middle, end)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_LIMIT_S)
        assert still_alive(family[1:]) == []
        print(f"in {SECONDS:g} s: {dict(done)}, {preempted:g} preemptions, MiB, threads, handles {middle} -> {end}")
