# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on a GPU, engine and front in processes of their own: chats stream while long prompts arrive."""

import json
import signal

import pytest
import tiny_model
from divisions import BOTH_KINDS, split
from engine_models import NOT_COMPILED, wide_model
from metrics_page import Page
from process_helpers import HANG_LIMIT_S
from server import Chat, serving, still_alive

QUESTIONS = ("Tell me a story about a dog.", "Why is the sky blue?", "Write a letter to a friend.", "What is rain?")
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 1500, 20
# The tiny model's tokens are bytes. Printable ones alone, so that each is a piece of text.
PRINTABLE = {"allowed_token_ids": [*range(94)]}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DRAIN_S = 60


def long_prompt(number):
    """About 1,500 bytes, which are the tokens; no two share a prefix."""
    return " ".join(f"{number}: ship {ship} carries {(ship * 7 + number) % 50} boxes." for ship in range(50))


@pytest.fixture(scope="module")
def settings(gpu):
    return split(gpu.multi_processor_count, BOTH_KINDS)


@pytest.fixture(scope="module")
def server(settings, server_environ, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    arguments = (
        *("--scheduler-cls", "vllm_pdmux.Scheduler", "--additional-config", json.dumps({"pdmux": settings})),
        *("--chat-template", CHAT_TEMPLATE, "--shutdown-timeout", str(DRAIN_S)),
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"),
        *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(2 << 30)),
        *("--compilation-config", json.dumps(NOT_COMPILED["compilation_config"])),
    )
    with serving(folder / "log", wide_model(folder / "model"), arguments, **server_environ) as server:
        yield server


@pytest.fixture(autouse=True)
def log_of_a_failure(server):
    """pytest prints what was printed before a failure: the server's last lines."""
    yield
    print(server.log.read_text()[-8000:])


def test_the_log_says_what_serves_and_on_which_sms(server):
    log = server.log.read_text()
    for said in (
        "PD-multiplexing is active, asked for by --scheduler-cls vllm_pdmux.Scheduler",
        "worker vllm_pdmux.worker.gpu.PDMuxGPUWorker instead of vllm.v1.worker.gpu_worker.Worker",
        "PD-multiplexing scheduler: asynchronous, policy table, lane threaded",
        *(f"PD-multiplexing group {number} ({kind}): " for number, kind in enumerate(BOTH_KINDS, 1)),
    ):
        assert said in log, said


def test_chats_stream_on_and_all_are_answered_while_long_prompts_arrive(server):
    chats = all_streaming(server, "together")
    before = [len(chat.pieces) for chat in chats]
    longs = [Chat(server, long_prompt(i), LONG_ANSWER_TOKENS, "together", **PRINTABLE) for i in range(8)]
    answers = [long.text() for long in longs]
    gained = [len(chat.pieces) - count for chat, count in zip(chats, before, strict=True)]
    assert all(len(answer) == LONG_ANSWER_TOKENS for answer in answers)
    assert all(len(chat.text()) == ANSWER_TOKENS for chat in chats)
    assert min(gained) > 0, gained


def test_the_metrics_count_what_was_served(server):
    before = server.value("generation_tokens_total")
    Chat(server, "Hello!", 16, "metrics", **PRINTABLE).text()
    assert server.value("generation_tokens_total") >= before + 16
    assert server.num_running() == 0


def test_the_metrics_count_what_the_lanes_did(server, settings):
    """All that was served by the tests above."""
    page = Page(server.get("metrics"))
    page.assert_whole(tiny_model.LAYERS)
    assert page.of("joins_total") >= 8  # each long prompt has joined the chats
    assert page.of("unconfined_steps_total") == 0  # every decode batch had its graph
    assert set(page.values["beside_steps_total"]) == {
        f"{number} {kind} {row[0]}:{row[1]}"
        for number, (kind, row) in enumerate(zip(BOTH_KINDS, settings["manual_divisions"], strict=True), 1)
    }


def test_sigterm_finishes_what_runs_and_leaves_no_process(server):
    """The last test of this server."""
    chats = all_streaming(server, "sigterm")
    longs = [Chat(server, long_prompt(i), 500, "sigterm", **PRINTABLE) for i in range(4)]
    for long in longs:
        long.wait_until(lambda long=long: long.pieces)  # a server that shuts down takes no more requests
    family = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_LIMIT_S) == 0
    assert all(len(chat.text()) == ANSWER_TOKENS for chat in chats)
    assert all(len(long.text()) == 500 for long in longs)
    assert still_alive(family) == []
    assert "fatal error" not in server.log.read_text()  # what an engine says that ended before its time


def all_streaming(server, salt):
    """Clients that have all got their first words."""
    chats = [Chat(server, question, ANSWER_TOKENS, salt, **PRINTABLE) for question in QUESTIONS]
    for chat in chats:
        chat.wait_until(lambda chat=chat: len(chat.pieces) >= 3)
    return chats
