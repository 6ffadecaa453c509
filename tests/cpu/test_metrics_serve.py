# SPDX-License-Identifier: Apache-2.0
"""Metrics of real servers: with several API servers, without statistics, and with the plugin merely installed."""

import json
import time

import pytest
import tiny_model
from metrics_page import PREFIX, Page
from process_helpers import HANG_LIMIT_S
from server import Server
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDS, PROMPT_TOKENS = 6, 200
STOCK = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32")
ACTIVE = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler"),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 2}})),
    *STOCK,
)


@pytest.fixture
def start(tmp_path, tiny_model_path):
    servers = []

    def start(*arguments):
        server = Server(tmp_path / "log", tiny_model_path, arguments, OMP_NUM_THREADS="1")
        servers.append(server)
        server.wait_until_ready()
        return server

    yield start
    print((tmp_path / "log").read_text()[-8000:])
    for server in servers:
        server.kill()


def complete(server, prompt, max_tokens, **extra):
    """By a connection of its own, which any of several API servers may accept."""
    body = {"ignore_eos": True}
    return server.api().completions.create(
        model=server.model, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=body, **extra
    )


def prompt_of(number):
    return [(number * 7 + i * 3) % tiny_model.EOS for i in range(PROMPT_TOKENS)]


def prefill_beside_a_stream(server, number):
    """The text of a prompt that comes while another request decodes, which it does until both are done with."""
    stream = complete(server, [number + 1] * 10, 1000, stream=True)
    next(iter(stream))
    reply = complete(server, prompt_of(number), 4)
    stream.close()
    return reply.choices[0].text


def wait_until_idle(server):
    """Until the statistics of the last step have come, in which the last stream was aborted."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while server.num_running() or Page(server.get("metrics")).of("joins_total") < ROUNDS:
        assert time.monotonic() < deadline, server.get("metrics")
        time.sleep(0.2)


def texts_of_stock(engine):
    """By an engine in this process."""
    prompts = [{"prompt_token_ids": prompt_of(number)} for number in range(ROUNDS)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return [output.outputs[0].text for output in engine.llm.generate(prompts, greedy, use_tqdm=False)]


def test_several_api_servers_answer_as_stock_and_show_all_that_was_counted_once(start, stock):
    server = start(*ACTIVE, "--api-server-count", "2")
    texts = [prefill_beside_a_stream(server, number) for number in range(ROUNDS)]
    assert texts == texts_of_stock(stock)
    wait_until_idle(server)
    for _ in range(4):  # from whichever of them answers
        page = Page(server.get("metrics"))
        page.assert_whole(tiny_model.LAYERS)
        assert page.of("prefill_batches_total", "ended") == page.of("joins_total") == ROUNDS
        assert page.of("prefill_tokens_total") == ROUNDS * PROMPT_TOKENS
        assert page.of("steps_total", "prefill") == ROUNDS  # the first prompt of each round, alone


def test_without_statistics_there_are_none(start):
    server = start(*ACTIVE, "--disable-log-stats")
    prefill_beside_a_stream(server, 0)
    text = server.get("metrics")
    assert PREFIX not in text and "vllm:num_requests_running" not in text


def test_merely_installed_there_are_none(start):
    server = start(*STOCK)
    complete(server, [1, 2, 3], 4)
    text = server.get("metrics")
    assert PREFIX not in text and "vllm:num_requests_running" in text
    assert "PD-multiplexing" not in server.log.read_text()
