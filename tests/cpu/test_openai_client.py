# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` and the openai client: chat, completions, tools, JSON, logprobs and more, as stock vLLM answers them.

Many clients come at once to a server that is decoding, on which all their prompts go through the lane.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
from server_pair import CHUNK
from tokens import LOGPROB_TOLERANCE

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("logs_of_a_failure")]

CITIES = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "description": f"{name} in a city", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", city=CITIES, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    tool("get_time", city=CITIES),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "city": CITIES},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def said(role, content):
    return {"role": role, "content": content}


def call(city):
    return f'<tool_call>\n{{"name": "get_time", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def question(content):
    return {"messages": [said("user", content)], "max_tokens": 24}


# The model is small: it calls a tool of its own accord when it has seen it done.
ASKING_FOR_A_CALL = [
    said("system", f"Answer with exactly one tool call in this form:\n{call('Oslo')}"),
    *(said("user", "What time is it in Oslo?"), said("assistant", call("Oslo"))),
    said("user", "What time is it in Rome?"),
]
ASKING_FOR_WEATHER = [said("user", "What is the weather in Rome in celsius?")]
FACTS = [f"Ship {number} carries {number * 7 % 50} boxes." for number in range(60)]
FRANCE = {"prompt": "The capital of France is", "max_tokens": 16}
REQUESTS = {  # those with messages are chats
    "chat": question("Name three primary colors."),
    "chat, streaming": question("Why is the sky blue?") | {"stream": True},
    "completion": FRANCE,
    "completion, streaming": FRANCE | {"stream": True},
    "completion of tokens": {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 16},
    "two prompts": {"prompt": ["The sea is", "A tree has"], "max_tokens": 8},
    "a tool, auto": {"messages": ASKING_FOR_A_CALL, "tools": TOOLS, "tool_choice": "auto", "max_tokens": 80},
    "a tool, required": {"messages": ASKING_FOR_WEATHER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 80},
    "a tool, named": {
        "messages": ASKING_FOR_WEATHER,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "max_tokens": 80,
    },
    "JSON": question("Describe Anna, who is 31 and lives in Rome, as JSON.")
    | {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}
    | {"max_tokens": 60},
    "logprobs": question("What is the capital of Norway?") | {"logprobs": True, "top_logprobs": 3, "max_tokens": 8},
    "logprobs of a completion": FRANCE | {"logprobs": 2, "max_tokens": 8},
    "echo with logprobs": FRANCE | {"logprobs": 1, "echo": True, "max_tokens": 4},
    "stop": question("Name three primary colors.") | {"stop": ["Green", "Blue"]},
    "stop, streaming": question("Name three primary colors.") | {"stop": ["Green", "Blue"], "stream": True},
    "beams": FRANCE | {"n": 3, "max_tokens": 4, "extra_body": {"use_beam_search": True}},
    "a long chat": question(" ".join(FACTS[:30]) + " Which ship is full?") | {"max_tokens": 8},
    "a longer one, streaming": question(" ".join(FACTS) + " Which is empty?") | {"max_tokens": 8, "stream": True},
}
STREAMED_TOO = ("a tool, auto", "a tool, required", "a tool, named", "JSON", "logprobs")


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)  # by index: name and arguments
    logprobs: list[tuple[str, float]] = field(default_factory=list)  # each token and its alternatives, in order


@dataclass
class Answer:
    choices: list[Choice]
    usage: dict[str, Any]


def answer(server, request):
    """What the client has got when a request has ended, whole or from the pieces of a stream."""
    openai_client, is_chat, streams = server.api(), "messages" in request, request.get("stream", False)
    create = openai_client.chat.completions.create if is_chat else openai_client.completions.create
    options = {"stream_options": {"include_usage": True}} if streams else {}
    reply = create(model=server.model, **{"temperature": 0} | options | request)
    choices, usage = {}, None
    for part in reply if streams else [reply]:
        usage = part.usage or usage
        for piece in part.choices:
            message = (piece.delta if streams else piece.message) if is_chat else None
            add(choices.setdefault(piece.index, Choice()), piece, message)
    return Answer([choices[index] for index in sorted(choices)], usage.model_dump())


def add(choice, piece, message):
    """A choice of a reply, or a piece of one, to what has come of it. `message`: of a chat."""
    choice.text += (piece.text if message is None else message.content) or ""
    choice.finish_reason = piece.finish_reason or choice.finish_reason
    for position, one in enumerate((message and message.tool_calls) or ()):
        name_and_arguments = choice.calls.setdefault(getattr(one, "index", position), ["", ""])
        name_and_arguments[0] += one.function.name or ""
        name_and_arguments[1] += one.function.arguments or ""
    if piece.logprobs is None:
        return
    if message is None:
        tops = piece.logprobs.top_logprobs
        choice.logprobs += [pair for top in tops for pair in sorted((top or {}).items())]
    else:
        for token in piece.logprobs.content:
            choice.logprobs += [(one.token, one.logprob) for one in (token, *token.top_logprobs)]


def all_requests():
    streamed = {f"{name}, streaming": REQUESTS[name] | {"stream": True} for name in STREAMED_TOO}
    return REQUESTS | streamed


def all_at_once(server):
    """Every request by a client of its own, none before all are ready; the answer or the error of each."""
    requests = all_requests()
    ready = threading.Barrier(len(requests))

    def ask(request):
        ready.wait()
        try:
            return answer(server, request)
        except Exception as error:  # noqa: BLE001 - for the test of this request to report
            return error

    with ThreadPoolExecutor(len(requests)) as clients:
        return dict(zip(requests, clients.map(ask, requests.values()), strict=True))


@pytest.fixture(scope="module")
def answers(server_pair):
    return server_pair.ask(all_at_once)


@pytest.fixture(scope="module")
def got(answers):
    return answers[1]


def assert_same_answer(got, expected):
    assert isinstance(got, Answer) and isinstance(expected, Answer), (got, expected)
    for mine, theirs in zip(got.choices, expected.choices, strict=True):
        assert (mine.text, mine.calls, mine.finish_reason) == (theirs.text, theirs.calls, theirs.finish_reason)
        assert [token for token, _ in mine.logprobs] == [token for token, _ in theirs.logprobs]
        values = [value for _, value in theirs.logprobs]
        assert [value for _, value in mine.logprobs] == pytest.approx(values, abs=LOGPROB_TOLERANCE)
    assert got.usage == expected.usage


@pytest.mark.parametrize("name", all_requests())
def test_an_answer_and_its_usage_are_stocks(answers, name):
    expected, got = answers
    assert_same_answer(got[name], expected[name])


@pytest.mark.parametrize("suffix", ["", ", streaming"])
@pytest.mark.parametrize(("choice", "name"), [("auto", "get_time"), ("required", "get_weather"), ("named", "get_time")])
def test_tools_are_called(got, choice, name, suffix):
    (one,) = got[f"a tool, {choice}{suffix}"].choices
    ((called, arguments),) = one.calls.values()
    assert called == name
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("name", ["JSON", "JSON, streaming"])
def test_json_is_of_its_schema(got, name):
    (one,) = got[name].choices
    jsonschema.validate(json.loads(one.text), PERSON)
    assert one.finish_reason == "stop"


@pytest.mark.parametrize("name", ["stop", "stop, streaming"])
def test_a_stop_string_ends_an_answer(got, name):
    (one,) = got[name].choices
    assert one.finish_reason == "stop" and one.text.endswith("Red, ")


def test_there_are_as_many_answers_as_asked_for(got):
    texts = [choice.text for choice in got["beams"].choices]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("name", ["logprobs", "logprobs, streaming", "logprobs of a completion", "echo with logprobs"])
def test_there_are_logprobs(got, name):
    answer = got[name]
    assert len(answer.choices[0].logprobs) > answer.usage["completion_tokens"]


def test_the_long_prompts_were_chunked(server_pair, got):
    assert got["a longer one, streaming"].usage["prompt_tokens"] > 2 * CHUNK
    assert server_pair.counted("prefill_batches_total", result="failed") == 0
    assert server_pair.counted("prefill_batches_total", result="dropped") == 0


def test_seeded_samples_are_stocks(server_pair):
    """By itself: among many its prompt may be chunked, and then stock vLLM cannot sample it on a CPU."""
    request = question("Tell me a story.") | {"n": 2, "temperature": 0.9, "seed": 7}
    expected, got = server_pair.ask(lambda server: answer(server, request))
    assert_same_answer(got, expected)
    assert got.choices[0].text != got.choices[1].text
