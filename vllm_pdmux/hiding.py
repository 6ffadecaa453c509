# SPDX-License-Identifier: Apache-2.0
"""How the scheduler hides requests from a call of stock ``schedule()``, and statistics from one of its updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.request import Request

from vllm_pdmux.adapters import adapter_of, fitting_adapters, in_their_places
from vllm_pdmux.beneath import SchedulerBeneath


class Hiding(SchedulerBeneath):
    """A mixin over one of vLLM's schedulers; all is put back when a context ends, also after an error."""

    _stats_muted = False

    @contextmanager
    def _visible(
        self, requests: list[Request], hidden_before: Iterable[Request] = (), hidden_after: Iterable[Request] = ()
    ) -> Iterator[None]:
        """Only `requests` run; afterwards all do again, in the order of their admission."""
        self.running = requests
        try:
            yield
        finally:
            self.running = [*hidden_before, *self.running, *hidden_after]

    @contextmanager
    def _hidden_queues(self) -> Iterator[None]:
        """No request waits; those that are preempted meanwhile wait in front afterwards."""
        waiting, kv_holding = self.waiting, self.kv_holding_waiting
        self.waiting, self.kv_holding_waiting = create_request_queue(self.policy), create_request_queue(self.policy)
        try:
            yield
        finally:
            preempted, self.waiting, self.kv_holding_waiting = list(self.waiting), waiting, kv_holding
            for request in reversed(preempted):
                self.waiting.prepend_request(request)

    @contextmanager
    def _only_fitting_adapters(self) -> Iterator[None]:
        """Requests whose adapter of LoRA finds no slot do not wait; afterwards they do again, in their places.

        Stock counts the adapters of the requests that it sees, but those that are hidden have slots too.
        """
        if self.lora_config is None:
            yield
            return
        queues = self.waiting, self.kv_holding_waiting
        held = {adapter_of(request) for request in self.running}
        fitting = fitting_adapters(held, [*queues[1], *queues[0]], self.lora_config.max_loras)
        self.waiting, self.kv_holding_waiting = (
            self._queue_of(request for request in queue if adapter_of(request) in fitting) for queue in queues
        )
        try:
            yield
        finally:
            self.waiting, self.kv_holding_waiting = (
                self._queue_of(in_their_places(queue, left, fitting))
                for queue, left in zip(queues, (self.waiting, self.kv_holding_waiting), strict=True)
            )

    def _queue_of(self, requests: Iterable[Request]) -> RequestQueue:
        queue = create_request_queue(self.policy)
        for request in requests:
            queue.add_request(request)
        return queue

    @contextmanager
    def _muted_stats(self) -> Iterator[None]:
        """One step makes one set of statistics, though it is updated twice."""
        self._stats_muted = True
        try:
            yield
        finally:
            self._stats_muted = False

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._stats_muted else super().make_stats(*args, **kwargs)

    @contextmanager
    def _limited_to(self, tokens: int | None) -> Iterator[None]:
        """Let a view schedule no more than `tokens` tokens; None: as many as stock."""
        stock = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = stock if tokens is None else min(tokens, stock)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = stock
