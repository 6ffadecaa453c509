# SPDX-License-Identifier: Apache-2.0
"""One run of the workload on one engine, measured step by step.

All times are of a clock that runs only inside the engine: drawing the picture between two steps costs nothing in them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from vllm_pdmux.demo.contention import OtherProcesses
from vllm_pdmux.demo.engine import trace_of
from vllm_pdmux.demo.workload import DOCUMENT, Prompt, Workload


@dataclass(frozen=True)
class LayerStep:
    """An engine step that ran layers of the document's prefill."""

    first_layer: int  # layers [first_layer, end_layer) ran
    end_layer: int
    decode_batch: int  # requests that decoded in it
    ms: float


@dataclass(frozen=True)
class Run:
    """What one engine did."""

    texts: dict[str, str]  # by request
    ttft_ms: float | None  # of the document; None: it got no token
    itl_ms: tuple[float, ...]  # gaps between the tokens of the chats, all of them
    itl_during_prefill_ms: tuple[float, ...]  # those with the document's prefill in them
    decode_steps_ms: tuple[float, ...]  # of the steps that gave chats a token while the document waited for its first
    timeline: tuple[LayerStep, ...]  # empty with stock vLLM, which runs all layers in one step
    others_cpu_share: float | None  # share of the CPUs that other processes used meanwhile, 0 to 1; None: not known


@dataclass
class Progress:
    """The state of a run, for whoever watches it. Written by `drive` only."""

    texts: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    document_arrived: bool = False
    layers_done: int = 0  # of the document's prefill, as far as the engine tells
    has_first_token: bool = False  # the document


class _Clock:
    """Milliseconds spent in the engine."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.now_ms += (time.perf_counter() - start) * 1e3


def drive(llm: Any, workload: Workload, watch: Callable[[Progress], None] = lambda progress: None) -> Run:
    """Run `workload` to its end. `watch` is called after every step, and when the document arrives."""
    return _Driver(llm, workload).run(watch)


class _Driver:
    def __init__(self, llm: Any, workload: Workload):
        self._engine = llm.llm_engine
        self._trace = trace_of(llm)
        self._workload = workload
        self._clock = _Clock()
        self._progress = Progress()
        self._token_times: dict[str, list[float]] = {prompt.name: [] for prompt in workload.prompts}
        self._tokens = dict.fromkeys(self._token_times, 0)
        self._arrived_ms: float | None = None
        self._timeline: list[LayerStep] = []
        self._decode_steps_ms: list[float] = []

    def run(self, watch: Callable[[Progress], None]) -> Run:
        others = OtherProcesses()
        if self._trace is not None:
            self._trace.clear()
        for prompt in self._workload.chats:
            self._add(prompt)
        while self._engine.has_unfinished_requests():
            self._step()
            watch(self._progress)
            if self._arrived_ms is None and self._chats_stream():
                self._arrived_ms = self._clock.now_ms
                self._add(self._workload.document)
                self._progress.document_arrived = True
                watch(self._progress)
        return self._result(others.share())

    def _add(self, prompt: Prompt) -> None:
        from vllm import SamplingParams

        workload = self._workload
        params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=workload.ignore_eos)
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if workload.cache_salt is not None:
            tokens["cache_salt"] = workload.cache_salt
        with self._clock.running():
            self._engine.add_request(prompt.name, tokens, params)

    def _chats_stream(self) -> bool:
        """Whether every chat has streamed the tokens that the document waits for, or has ended."""
        return all(
            self._tokens[chat.name] >= self._workload.arrives_after or chat.name in self._progress.finished
            for chat in self._workload.chats
        )

    def _step(self) -> None:
        before_ms = self._clock.now_ms
        waits = self._arrived_ms is not None and not self._progress.has_first_token
        with self._clock.running():
            outputs = self._engine.step()
        named = {output.request_id for output in outputs if self._take(output)}
        step_ms = self._clock.now_ms - before_ms
        if waits and named - {DOCUMENT}:
            self._decode_steps_ms.append(step_ms)
        self._progress.has_first_token = bool(self._token_times[DOCUMENT])
        self._read_trace(step_ms, waits)

    def _take(self, output: Any) -> bool:
        """Note what came for a request; whether it got a token."""
        name, completion = output.request_id, output.outputs[0]
        self._progress.texts[name] = completion.text
        if output.finished:
            self._progress.finished.add(name)
        if len(completion.token_ids) == self._tokens[name]:
            return False
        self._tokens[name] = len(completion.token_ids)
        self._token_times[name].append(self._clock.now_ms)
        return True

    def _read_trace(self, step_ms: float, waits: bool) -> None:
        if self._trace is None:
            return
        for record in self._trace.steps:
            if waits and record.end_layer > record.first_layer:
                self._timeline.append(LayerStep(record.first_layer, record.end_layer, record.decode_batch, step_ms))
                self._progress.layers_done = record.end_layer
        self._trace.clear()

    def _result(self, others_cpu_share: float | None) -> Run:
        document_ms = self._token_times[DOCUMENT]
        arrived_ms = self._clock.now_ms if self._arrived_ms is None else self._arrived_ms
        first_token_ms = document_ms[0] if document_ms else None
        gaps = [gap for chat in self._workload.chats for gap in pairwise(self._token_times[chat.name])]
        end_ms = self._clock.now_ms if first_token_ms is None else first_token_ms
        return Run(
            texts={prompt.name: self._progress.texts.get(prompt.name, "") for prompt in self._workload.prompts},
            ttft_ms=None if first_token_ms is None else first_token_ms - arrived_ms,
            itl_ms=tuple(end - start for start, end in gaps),
            itl_during_prefill_ms=tuple(end - start for start, end in gaps if end > arrived_ms and start < end_ms),
            decode_steps_ms=tuple(self._decode_steps_ms),
            timeline=tuple(self._timeline),
            others_cpu_share=others_cpu_share,
        )
