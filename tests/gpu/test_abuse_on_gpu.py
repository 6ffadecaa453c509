# SPDX-License-Identifier: Apache-2.0
"""The 8B shape served with too little KV cache to 64 clients of each server who ask for anything (tests/cpu/abuse.py).

PDMUX_ABUSE_S: for how many seconds (default: 60). Two servers with the plugin at the same time, whose answers are as
near to those that stock vLLM gives to one request at a time as stock vLLM's own are under the same abuse.
"""

import itertools
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from abuse import Abuse, abuse_until_sigterm, abused, use_of
from divisions import BOTH_KINDS, split
from engine_models import NOT_COMPILED
from server import Server

from vllm_pdmux.verify import judge
from vllm_pdmux.verify.answers import Answer

SECONDS = float(os.environ.get("PDMUX_ABUSE_S", "60"))
STOCK_SECONDS = 40.0
SHAPE, LIMIT_TOKENS, BLOCKS = "llama-8b", 4096, 800  # of 16 tokens: three of the longest requests
ANSWER_STEP, KNOWN = 12, 12  # answers grow enough for requests to be preempted
LIKELIEST = 50  # so many logprobs at each place tell a wrong answer from one of another batch
GPU_GROWTH_MIB = 64  # of all that is on the device, between the first half and the end
PROFILE = Path(__file__).parents[2] / "benchmarks/results/profile-h200-llama-8b.json"
ARGUMENTS = (
    *("--load-format", "dummy", "--max-model-len", str(LIMIT_TOKENS), "--max-num-seqs", "32"),
    *("--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", str(BLOCKS)),
    *("--max-logprobs", str(LIKELIEST)),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(8 << 30)),
    *("--compilation-config", json.dumps(NOT_COMPILED["compilation_config"])),
)


class WideServer(Server):
    """Its made-up weights are wide enough for answers to depend on what was read."""

    script = Path(__file__).with_name("wide_cli.py")


class Nearness:
    """The largest difference of a logprob between an answer and the one that is known, of one server's clients."""

    def __init__(self):
        self._lock = threading.Lock()  # each client is a thread
        self.found = judge.Difference()
        self.answers = self.tokens = self.compared = 0

    def __call__(self, tokens, expected, got):
        mine, theirs = answer(got), answer(expected)
        other = judge.first_other(mine, theirs)
        widest = judge.widest(mine, theirs, f"{len(tokens)} tokens")
        with self._lock:
            self.found = max(self.found, widest, key=lambda one: one.nats)
            self.answers += 1
            self.tokens += len(mine.tokens)
            self.compared += len(mine.tokens) if other is None else other
        return "" if len(mine.tokens) == len(theirs.tokens) else "an answer of another length"

    def plain(self):
        counts = {"answers": self.answers, "tokens": self.tokens, "compared": self.compared}
        return {"found": vars(self.found), **counts}


def answer(choice):
    return Answer(choice.logprobs.tokens, choice.logprobs.top_logprobs)


def abuse_of(nearness, seconds):
    return Abuse(seconds, LIMIT_TOKENS, range(3, 90), nearness, LIKELIEST, ANSWER_STEP, KNOWN)


def use_with_gpu(processes):
    free, total = torch.cuda.mem_get_info()
    used = use_of(processes)
    used.others["gpu_mib"] = (total - free) / 2**20
    return used


def settings_of(total_sms):
    """Two of the ways to be served: the default policy, and latency targets; with few layers at a time."""
    table = split(total_sms, BOTH_KINDS) | {"layers_per_group": 3}
    rows = enumerate(table["manual_divisions"], 1)
    table["manual_divisions"] = [[prefill, decode, batch] for batch, (prefill, decode, _) in rows]  # each is used
    slo = split(total_sms, BOTH_KINDS) | {"itl_slo_ms": 20, "ttft_slo_ms": 2000, "calibration": str(PROFILE)}
    return {"table": table, "slo": slo}


@pytest.fixture
def servers(gpu, server_environ, tmp_path):
    """By name, all ready."""
    import serving

    folder = serving.model(SHAPE)
    plugin = ("--scheduler-cls", "vllm_pdmux.Scheduler", "--additional-config")
    arguments = {"stock": ()}
    for name, settings in settings_of(gpu.multi_processor_count).items():
        arguments[name] = (*plugin, json.dumps({"pdmux": settings}))
    with ExitStack() as stack:
        started = {}
        for name, own in arguments.items():
            started[name] = WideServer(tmp_path / name, folder, (*ARGUMENTS, *own), **server_environ)
            stack.callback(started[name].kill)
        for server in started.values():
            server.wait_until_ready()
        yield started
        for name in started:  # pytest prints it where the test has failed
            print(name, (tmp_path / name).read_text()[-4000:])


def test_whatever_clients_do(servers, record_property):
    stocks, nearness = Nearness(), {name: Nearness() for name in servers if name != "stock"}
    stock = servers.pop("stock")
    known = abuse_of(stocks, STOCK_SECONDS).known(stock)
    abused(stock, abuse_of(stocks, STOCK_SECONDS), known)
    stock.kill()
    limit, strangers = judge.SLACK * stocks.found.nats, nearest_of_others(known)
    assert 0 < limit < strangers, "the answers to other prompts are as near"

    with ThreadPoolExecutor(len(servers)) as pool:

        def serve(name):
            return abuse_until_sigterm(servers[name], abuse_of(nearness[name], SECONDS), known, use_with_gpu)

        try:
            counts = dict(zip(servers, pool.map(serve, servers), strict=True))
            record_property("abuse", counts)
        finally:
            answers = {name: seen.plain() for name, seen in {**nearness, "stock": stocks}.items()}
            record_property("answers", {**answers, "nearest of other prompts": strangers})
    for name, seen in nearness.items():
        assert seen.found.nats <= limit < math.inf, name
        middle, end = (counts[name][when]["others"]["gpu_mib"] for when in ("middle", "end"))
        assert end <= middle + GPU_GROWTH_MIB, (name, middle, end)


def nearest_of_others(known):
    """Of the known answers to two prompts that share no prefix: what a wrong answer would be off at least."""
    apart = [answer(choice) for tokens, choice in known if tokens[-1] != 7]
    return min(judge.widest(*pair, "").nats for pair in itertools.combinations(apart, 2))
