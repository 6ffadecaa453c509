# SPDX-License-Identifier: Apache-2.0
"""A real server and real clients: answers stream while a long prompt is prefilled, and SIGTERM ends all of it."""

import json
import signal
from dataclasses import dataclass

import pytest
from metrics_page import Page
from process_helpers import HANG_LIMIT_S, model
from server import Chat, serving, still_alive

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS, LAYERS_PER_GROUP = 30, 2
QUESTIONS = ("Tell me a story about a dog.", "Why is the sky blue?", "Write a letter to a friend.")
LONG_PROMPT = " ".join(f"Ship {number} carries {number * 7 % 50} boxes." for number in range(150)) + " Which is full?"
EXIT_STATUS_OF_STOCK = 0  # what a server without the plugin gives after SIGTERM, while it drains or aborts
DRAIN_S = 240
ARGUMENTS = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler"),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": LAYERS_PER_GROUP}})),
    *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"),  # no near ties between tokens
    *("--shutdown-timeout", str(DRAIN_S)),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "log", model(), ARGUMENTS) as server:
        yield server


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
    gained = [len(chat.pieces) - count for chat, count in zip(chats, before, strict=True)]
    return Together(gained, [chat.text() for chat in (*chats, long)])


@pytest.fixture(scope="module")
def alone(server):
    """The same requests one after the other: each is stock vLLM's prefill, then stock vLLM's decode."""
    prompts = zip((*QUESTIONS, LONG_PROMPT), (60, 60, 60, 8), strict=True)
    return [Chat(server, prompt, max_tokens, "alone").text() for prompt, max_tokens in prompts]


def test_one_client_streams_an_answer(server):
    chat = Chat(server, "Hello!", 16, "one")
    assert chat.text() and len(chat.pieces) > 8


def test_running_answers_go_on_while_a_long_prompt_is_prefilled(together):
    """A stock step would prefill this prompt at once; here each layer group lets every running answer have a token."""
    assert min(together.gained) >= LAYERS // LAYERS_PER_GROUP // 2, together.gained


def test_the_texts_of_clients_at_once_are_those_of_each_alone(together, alone):
    assert together.texts == alone


def test_the_metrics_say_what_was_served(server, together):
    """All that was asked has ended, and prompts of one chunk join with their batch."""
    page = Page(server.get("metrics"))
    page.assert_whole(LAYERS)
    assert page.of("joins_total") >= page.of("prefill_batches_total", "ended")
    assert page.of("steps_total", "beside") >= page.of("prefill_layers_total") // LAYERS_PER_GROUP
    assert "missed_steps_total" not in page.values  # there is no target


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
