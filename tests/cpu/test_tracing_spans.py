# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests that were prefilled in the lane, and the events that their times come from."""

import functools
import secrets

import pytest
from driver import Arrival, prompt
from server_pair import wait_until
from vllm import SamplingParams
from vllm.tracing import SpanAttributes
from vllm.v1.engine import EngineCoreEventType

pytestmark = pytest.mark.engine

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ARRIVALS = [
    Arrival("chat", prompt(20, 1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
    Arrival("short", prompt(30, 2), GREEDY, step=4),
    Arrival("long", prompt(300, 3), GREEDY, step=4),  # two chunks
    Arrival("later", prompt(90, 4), GREEDY, step=20),
]


# --- in one process ---------------------------------------------------------------------------------------------------


class Heard:
    """What the front end is told of each request: events, statistics of its prefill, and when its tokens came."""

    def __init__(self, driver, monkeypatch):
        self.events, self.prefills, self.token_times = {}, {}, {}
        processor = driver.engine.output_processor
        stock = processor.process_outputs

        def process_outputs(outputs, *args, engine_core_timestamp, **kwargs):
            for output in outputs:
                name = output.request_id.rpartition("-")[0]
                self.events.setdefault(name, []).extend(output.events or ())
                if output.prefill_stats is not None:
                    self.prefills.setdefault(name, []).append(output.prefill_stats)
                if output.new_token_ids:
                    self.token_times.setdefault(name, []).append(engine_core_timestamp)
            return stock(outputs, *args, engine_core_timestamp=engine_core_timestamp, **kwargs)

        monkeypatch.setattr(processor, "process_outputs", process_outputs)

    def types(self):
        return {name: [event.type for event in events] for name, events in self.events.items()}

    def assert_ordered(self):
        for name, events in self.events.items():
            times = [event.timestamp for event in events]
            assert times == sorted(times) and times[-1] <= self.token_times[name][-1], name


@pytest.fixture
def heard(stock, pdmux, monkeypatch):
    return {"stock": Heard(stock, monkeypatch), "pdmux": Heard(pdmux, monkeypatch)}


def test_events_are_those_of_stock_and_in_order(assert_same_as_stock, pdmux, heard):
    were_in_lane = set()

    def look(driver):
        were_in_lane.update(arrival.name for arrival in ARRIVALS if driver.in_lane(arrival.name))

    assert_same_as_stock(ARRIVALS, look)
    assert were_in_lane == {"short", "long", "later"}
    assert heard["pdmux"].types() == heard["stock"].types()
    assert set(map(tuple, heard["pdmux"].types().values())) == {(QUEUED, SCHEDULED)}
    assert heard["pdmux"].prefills == heard["stock"].prefills
    assert {name: [one.num_computed_tokens for one in told] for name, told in heard["pdmux"].prefills.items()} == {
        arrival.name: [len(arrival.prompt)] for arrival in ARRIVALS
    }
    for one in heard.values():
        one.assert_ordered()
        for name, events in one.events.items():
            assert events[-1].timestamp < one.token_times[name][0]
    for name, times in heard["stock"].token_times.items():
        assert len(heard["pdmux"].token_times[name]) == len(times)


def test_a_request_that_is_sent_back_from_the_lane_is_said_to_be_preempted(pdmux, heard):
    """As stock vLLM says it of all that run when the prefix cache is reset under them."""

    def reset_in_mid_prefill(driver):
        if driver.in_lane("long") and driver.layer() > 0 and not resets:
            resets.append(driver.scheduler.reset_prefix_cache(reset_running_requests=True))

    resets = []
    pdmux.run(ARRIVALS[:3], reset_in_mid_prefill)
    assert resets == [True]
    assert heard["pdmux"].types()["long"] == [QUEUED, SCHEDULED, PREEMPTED, SCHEDULED]
    heard["pdmux"].assert_ordered()


# --- in a server ------------------------------------------------------------------------------------------------------

PARENT = "00f067aa0ba902b7"
PROMPT = " ".join(f"Box {number} holds {number * 7 % 50} pens." for number in range(80))
TIMES = {
    "ttft": SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN,
    "e2e": SpanAttributes.GEN_AI_LATENCY_E2E,
    "queue": SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE,
    "prefill": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL,
    "decode": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE,
    "inference": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE,
}


def traced(server, trace_id):
    """Usage of a request that is a part of this trace."""
    reply = server.api().completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        extra_headers={"traceparent": f"00-{trace_id}-{PARENT}-01"},
        extra_body={"ignore_eos": True},
    )
    return reply.usage


@pytest.fixture(scope="module")
def spans(server_pair):
    """The span of a request, by stock vLLM and by the plugin, and the usage that its client was told."""
    trace_ids = {server.port: secrets.token_hex(16) for server in (server_pair.stock, server_pair.pdmux)}
    usages = server_pair.ask(lambda server: traced(server, trace_ids[server.port]))
    found = []
    for trace_id in trace_ids.values():
        wait_until(functools.partial(server_pair.collector.of_trace, trace_id))
        (span,) = server_pair.collector.of_trace(trace_id)
        found.append(span)
    return list(zip(found, usages, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("logs_of_a_failure")
def test_a_request_in_the_lane_has_a_span_as_in_stock(spans):
    (expected, _), (got, _) = spans
    assert (got.name, got.parent_id) == (expected.name, expected.parent_id) == ("llm_request", PARENT)
    assert got.attributes.keys() == expected.attributes.keys() >= set(TIMES.values())
    varies = {*TIMES.values(), SpanAttributes.GEN_AI_REQUEST_ID}
    assert all(got.attributes[name] == value for name, value in expected.attributes.items() if name not in varies)


@pytest.mark.slow
@pytest.mark.usefixtures("logs_of_a_failure")
def test_the_times_of_a_span_are_parts_of_the_request(spans):
    for span, usage in spans:
        times = {name: span.attributes[attribute] for name, attribute in TIMES.items()}
        assert times["queue"] >= 0 and times["prefill"] > 0 and times["decode"] > 0
        assert times["inference"] == pytest.approx(times["prefill"] + times["decode"])
        assert times["prefill"] < times["ttft"] < times["e2e"]
        assert times["queue"] + times["inference"] < times["e2e"]
        assert span.start_ns < span.end_ns
        assert span.attributes[SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS] == usage.prompt_tokens
        assert span.attributes[SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS] == usage.completion_tokens == 6
