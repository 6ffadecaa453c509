# SPDX-License-Identifier: Apache-2.0
"""A real server whose engine is killed, or that is stopped, while a prompt is in the lane: every client is told, or
served to the end where that was asked for, and no process is left."""

import json
import signal

import psutil
import pytest
from process_helpers import HANG_LIMIT_S
from server import Chat, serving, still_alive
from tiny_model import CHAT_TEMPLATE, PRINTABLE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = ("Why is the sky blue?", "What is rain?", "Who keeps bees?")
LONG_PROMPT = " ".join(f"Ship {number} carries {number * 7 % 50} boxes." for number in range(30))
# vLLM kills its engine in the moment in which it asks it to stop, so that the engine tells its clients only if it is
# quick, with the plugin and without; the server then waits until they have left.
LEAVES_AFTER_S = 60.0
ARGUMENTS = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler", "--chat-template", CHAT_TEMPLATE),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 1}})),
    *("--max-model-len", "1024", "--enforce-eager"),
)


@pytest.fixture
def server(tmp_path, tiny_model_path, request):
    with serving(tmp_path / "log", tiny_model_path, (*ARGUMENTS, *getattr(request, "param", ()))) as server:
        yield server
        print(server.log.read_text()[-6000:])  # pytest shows it of a failure


def in_mid_prefill(server, timeout_s=HANG_LIMIT_S):
    """Clients whose answers stream, and one whose prompt is in the lane."""
    settings = {"salt": "faults", "timeout_s": timeout_s, **PRINTABLE}
    chats = [Chat(server, question, 800, **settings) for question in QUESTIONS]
    for chat in chats:
        chat.wait_until(lambda chat=chat: len(chat.pieces) >= 3)
    long = Chat(server, LONG_PROMPT, 800, **settings)
    long.wait_until(lambda: server.num_running() == len(chats) + 1)
    return [*chats, long]


def assert_all_ended(server, clients, family):
    for client in clients:
        client.join(HANG_LIMIT_S)
        assert not client.is_alive() and client.finish_reason != "length", "an answer that cannot be whole"
    server.process.wait(HANG_LIMIT_S)
    assert still_alive(family) == []


def test_an_engine_that_is_killed_ends_the_server_and_every_client_is_told(server):
    clients = in_mid_prefill(server)
    family = server.descendants()
    (engine,) = [process for process in family if is_engine(process)]
    engine.kill()
    assert_all_ended(server, clients, family)
    assert all(client.error is not None or client.finish_reason == "error" for client in clients)
    assert "EngineDeadError" in server.log.read_text() or "died" in server.log.read_text()


def test_an_interrupt_ends_the_server(server):
    clients = in_mid_prefill(server, LEAVES_AFTER_S)
    family = server.descendants()
    server.process.send_signal(signal.SIGINT)
    assert_all_ended(server, clients, family)


@pytest.mark.parametrize("server", [("--shutdown-timeout", str(HANG_LIMIT_S))], ids=["drained"], indirect=True)
def test_a_server_that_is_drained_serves_what_is_in_the_lane(server):
    clients = in_mid_prefill(server)
    family = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    assert all(len(client.text()) > 0 for client in clients)  # each ends with "length"
    assert server.process.wait(HANG_LIMIT_S) == 0
    assert still_alive(family) == []


def is_engine(process: psutil.Process) -> bool:
    return "EngineCore" in " ".join([process.name(), *process.cmdline()])
