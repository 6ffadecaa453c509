# SPDX-License-Identifier: Apache-2.0
"""Two servers of the same command, one of them with the plugin, and what both answer to the same requests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from process_helpers import HANG_LIMIT_S, model
from prometheus_client.parser import text_string_to_metric_families
from server import Server

CHUNK = 256
STOCK = (
    *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"),  # no near ties between tokens
    *("--max-num-batched-tokens", str(CHUNK)),  # long prompts are chunked
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
PDMUX = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler"),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 5}})),
)
_salts = map("busy {}".format, itertools.count())


@contextlib.contextmanager
def decoding(server: Server) -> Iterator[None]:
    """Meanwhile one request decodes, so that a prompt which comes is prefilled in the lane where there is one."""
    wait_until(lambda: server.num_running() == 0)
    body = {"ignore_eos": True, "cache_salt": next(_salts)}
    stream = server.api().completions.create(
        model=server.model, prompt="Once upon a time", max_tokens=1900, stream=True, extra_body=body
    )
    with stream:
        next(iter(stream))
        yield
        assert server.num_running() >= 1, "nothing has decoded all the time"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def counted(page: str, name: str, labels: Mapping[str, str]) -> float:
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == f"vllm_pdmux:{name}"]
    (one,) = [sample for sample in samples if labels.items() <= sample.labels.items()]
    return one.value


@dataclass
class Pair:
    """The servers, and the spans that both send."""

    stock: Server
    pdmux: Server
    collector: Collector

    def ask(self, question: Callable[[Server], Any]) -> tuple[Any, Any]:
        """What stock vLLM and the plugin say to `question`, while another request decodes on each.

        The plugin has prefilled all of its prompts in the lane.
        """
        with decoding(self.stock):
            expected = question(self.stock)
        joined, alone = self.counted("joins_total"), self.counted("steps_total", kind="prefill")
        with decoding(self.pdmux):
            got = question(self.pdmux)
        wait_until(lambda: self.pdmux.num_running() == 0)
        assert self.counted("joins_total") > joined, "no prompt was prefilled in the lane"
        others = self.counted("steps_total", kind="prefill") - alone - 1
        assert others <= 0, "another prompt than that of the request that decodes was prefilled in a stock step"
        return expected, got

    def counted(self, name: str, **labels: str) -> float:
        """A count of the plugin's metrics."""
        return counted(self.pdmux.get("metrics"), name, labels)


@dataclass
class Span:
    """A span of vLLM's that ended."""

    name: str
    trace_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector on this machine; keeps each span that it is sent."""

    spans: list[Span] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def Export(self, request: Any, context: Any) -> Any:  # the protocol's name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                with self._lock:
                    self.spans += map(_span, scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Span]:
        with self._lock:
            return [span for span in self.spans if span.trace_id == trace_id]


def _span(sent: Any) -> Span:
    attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in sent.attributes}
    ids = sent.trace_id.hex(), sent.parent_span_id.hex()
    return Span(sent.name, *ids, sent.start_time_unix_nano, sent.end_time_unix_nano, attributes)


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its address."""
    collector, listening = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, listening)
    port = listening.add_insecure_port("127.0.0.1:0")
    listening.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        listening.stop(None)


@contextlib.contextmanager
def serving_pair(folder: Path) -> Iterator[Pair]:
    """Both servers, started at the same time."""
    with collecting() as (collector, endpoint):
        start = functools.partial(Server, OTEL_BSP_SCHEDULE_DELAY="100")  # milliseconds until a span is sent
        arguments = (*STOCK, "--otlp-traces-endpoint", endpoint)
        stock = start(folder / "stock.log", model(), arguments)
        pdmux = start(folder / "pdmux.log", model(), (*arguments, *PDMUX))
        try:
            stock.wait_until_ready()
            pdmux.wait_until_ready()
            yield Pair(stock, pdmux, collector)
        finally:
            stock.kill()
            pdmux.kill()
