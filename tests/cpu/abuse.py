# SPDX-License-Identifier: Apache-2.0
"""Clients of a real server who ask for anything, change their minds and send nonsense, and what they did to it."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil
from metrics_page import Page
from process_helpers import HANG_LIMIT_S
from server import Server, still_alive

STALL_S = 60.0  # without a token for anybody: a hang
RSS_GROWTH_MIB = 150  # between the first half and the end


@dataclass(frozen=True)
class Abuse:
    """What is done: `judge` (prompt, answer that it has alone, answer) says what is wrong with one, or nothing."""

    seconds: float
    limit_tokens: int  # of a prompt with its answer
    token_ids: range  # that prompts are made of
    judge: Callable[[list[int], Any, Any], str]
    logprobs: int | None = None
    answer_step: int = 4  # tokens: answers are so much longer than others, up to forty times
    known_prompts: int = 24  # whose answers are known, and nearly as many again that begin like one of them
    clients: int = 64

    def prompts(self) -> list[list[int]]:
        """The same for every server."""
        generator = random.Random(0)
        longest = self.limit_tokens - 40 * self.answer_step
        lengths = [generator.randint(1, longest) for _ in range(self.known_prompts)]
        prompts = [generator.choices(self.token_ids, k=tokens) for tokens in lengths]
        return prompts + [[*prompt[:200], 7] for prompt in prompts if len(prompt) > 200]  # prefixes are shared

    def nonsense(self) -> list[dict[str, Any]]:
        return [
            {"prompt": [3] * (self.limit_tokens + 200), "max_tokens": 5},
            {"prompt": [3, 4], "max_tokens": -1},
            {"prompt": [3, 4], "max_tokens": self.limit_tokens * 2},
            {"prompt": [3, 4], "temperature": -3.0},
            {"prompt": [], "max_tokens": 4},
            {"prompt": [3, 4], "n": 0},
        ]

    def ask(self, server: Server, api: openai.OpenAI, tokens: list[int]) -> Any:
        """For the whole answer to a prompt, whose length depends on that of the prompt; of one token, too."""
        return api.completions.create(
            model=server.model,
            prompt=tokens,
            max_tokens=1 + len(tokens) % 40 * self.answer_step,
            temperature=0,
            logprobs=self.logprobs,
            extra_body={"ignore_eos": True},
            stream=False,
        ).choices[0]

    def known(self, server: Server) -> list[tuple[list[int], Any]]:
        """Prompts and their answers, one after the other: each is stock vLLM's prefill, then stock vLLM's decode."""
        api = server.api()
        return [(tokens, self.ask(server, api, tokens)) for tokens in self.prompts()]


@dataclass
class Use:
    """Of the server's processes together."""

    rss_mib: float
    threads: int
    handles: int
    others: dict[str, float] = field(default_factory=dict)


class Client(threading.Thread):
    """One of many, who goes on until `until`."""

    def __init__(self, server: Server, number: int, abuse: Abuse, known: Sequence[tuple[list[int], Any]], until: float):
        super().__init__(daemon=True)
        self.random = random.Random(number)
        self.api = server.api()
        self.server, self.abuse, self.known, self.until = server, abuse, known, until
        self.done, self.problems = Counter(), []
        self.last_s = time.monotonic()
        self.start()

    def run(self) -> None:
        while time.monotonic() < self.until:
            what = self.random.choices((self.asks, self.leaves, self.talks_nonsense), (6, 3, 1))[0]
            try:
                what()
            except Exception as error:  # noqa: BLE001 - the test reports it
                self.problems.append(f"{what.__name__}: {type(error).__name__}: {error}")
                return
            self.done[what.__name__] += 1
            self.last_s = time.monotonic()

    def asks(self) -> None:
        """For an answer that is known, whole."""
        tokens, expected = self.random.choice(self.known)
        if problem := self.abuse.judge(tokens, expected, self.abuse.ask(self.server, self.api, tokens)):
            self.problems.append(f"{problem}, to a prompt of {len(tokens)} tokens")

    def leaves(self) -> None:
        """In the middle of an answer, or before it."""
        length = self.random.randint(1, self.abuse.limit_tokens - 60)
        stream = self.api.completions.create(
            model=self.server.model,
            prompt=self.random.choices(self.abuse.token_ids, k=length),
            max_tokens=self.random.choice((1, 10, 60)),
            stream=True,
            temperature=0,
        )
        with contextlib.closing(stream):
            for _, _ in zip(range(self.random.choice((0, 1, 4))), stream, strict=False):
                self.last_s = time.monotonic()

    def talks_nonsense(self) -> None:
        with contextlib.suppress(openai.BadRequestError):
            self.api.completions.create(model=self.server.model, **self.random.choice(self.abuse.nonsense()))
            raise AssertionError("nonsense was answered")


def use_of(processes: Sequence[psutil.Process]) -> Use:
    alive = [process for process in processes if process.is_running()]
    return Use(
        sum(process.memory_info().rss for process in alive) / 2**20,
        sum(process.num_threads() for process in alive),
        sum(process.num_fds() for process in alive),
    )


def abuse_until_sigterm(
    server: Server,
    abuse: Abuse,
    known: Sequence[tuple[list[int], Any]],
    use_of: Callable[[Sequence[psutil.Process]], Use] = use_of,
) -> dict[str, Any]:
    """Have all clients at it, then end the server; what was done. The server has the plugin and too little KV cache.

    It fails when nobody is served for long, an answer is wrong, prompts were not prefilled in the lane, the server
    grows, requests or KV blocks are left, or SIGTERM leaves a process.
    """
    family = server.family()
    clients, middle = abused(server, abuse, known, use_of)
    end = use_of(family)
    done = sum((client.done for client in clients), Counter())
    assert min(done[kind] for kind in ("asks", "leaves", "talks_nonsense")) > 0 and done["asks"] > len(clients) / 2
    wait_until_idle(server)
    page = Page(server.get("metrics"))
    batches = page.of("prefill_batches_total", "ended")
    assert batches > 10 and page.of("prefill_batches_total", "failed") == 0
    preemptions = server.value("num_preemptions_total")
    counts = {"preemptions": preemptions, "batches_in_lane": batches, "middle": vars(middle), "end": vars(end)}
    assert preemptions > 0, f"the KV cache was large enough: {dict(done)}, {counts}"
    assert end.rss_mib < middle.rss_mib + RSS_GROWTH_MIB, (middle, end)
    assert end.threads <= middle.threads + 4 and end.handles <= middle.handles + len(clients), (middle, end)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(HANG_LIMIT_S)
    assert still_alive(family[1:]) == []
    return {"seconds": abuse.seconds, "clients": len(clients), "done": dict(done), **counts}


def abused(
    server: Server,
    abuse: Abuse,
    known: Sequence[tuple[list[int], Any]],
    use_of: Callable[[Sequence[psutil.Process]], Use] = use_of,
) -> tuple[list[Client], Use]:
    """The clients when they are done, and what was in use when half of the time was over."""
    family = server.family()
    start = time.monotonic()
    clients = [Client(server, number, abuse, known, start + abuse.seconds) for number in range(abuse.clients)]
    middle = None
    while any(client.is_alive() for client in clients):
        time.sleep(0.5)
        now = time.monotonic()
        assert now - max(client.last_s for client in clients) < STALL_S, "nobody has had anything for long"
        if middle is None and now > start + abuse.seconds / 2:
            middle = use_of(family)
    problems = [problem for client in clients for problem in client.problems]
    assert not problems, problems[:5]
    return clients, middle


def wait_until_idle(server: Server) -> None:
    """Neither requests nor KV blocks in use. The gauge of the blocks is what the last step left."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while left := [name for name in ("num_requests_running", "num_requests_waiting") if server.value(name)]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.2)
    assert server.value("kv_cache_usage_perc") == 0, "KV blocks are left"
