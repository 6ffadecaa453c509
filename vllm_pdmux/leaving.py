# SPDX-License-Identifier: Apache-2.0
"""How a batch and its requests leave the prefill lane: ended, failed, aborted, preempted, paused.

Whatever the way, what was written in the scheduler's books for tokens that will not be computed is taken back, and no
block is free while a layer that uses it may still run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_pdmux.beneath import SchedulerBeneath
from vllm_pdmux.kv_events import not_announced
from vllm_pdmux.messages import LaneReport
from vllm_pdmux.metrics.counters import Counters
from vllm_pdmux.metrics.definitions import DROPPED, FAILED
from vllm_pdmux.outputs import outputs_of_ended
from vllm_pdmux.prefill_batch import PrefillBatch

logger = init_logger("vllm.pdmux.scheduler")


class Leaving(SchedulerBeneath):
    """A mixin over one of vLLM's schedulers."""

    _batches: deque[PrefillBatch]  # in the lane, in order
    _lost: list[PrefillBatch]  # given up, of which the device may still run something
    _counters: Counters | None
    _drop: int | None  # the last batch that the worker has still to be told to drop
    _prefill_prev_step: set[str]
    _muted_stats: Callable[[], AbstractContextManager[None]]  # of Hiding

    def _batch(self, batch_id: int) -> PrefillBatch | None:
        return next((batch for batch in self._batches if batch.id == batch_id), None)

    def _update_lane(self, report: LaneReport) -> dict[int, EngineCoreOutputs]:
        for run in report.runs:
            if (ran := self._batch(run.batch_id)) is not None:
                ran.layers_launched = max(ran.layers_launched, run.end_layer)
        batch = self._batch(report.batch_id)
        if batch is None:
            return {}  # dropped meanwhile
        if not report.ended:
            return {}
        assert batch is self._batches[0], "batches leave the lane in order"
        self._batches.popleft()
        if report.output is None:
            return self._fail(batch, report.error or "unknown error")
        output = batch.output_for(self.requests)
        self.kv_cache_manager.block_pool.kv_event_queue.extend(batch.stored_events)
        with self._muted_stats():
            outputs = super().update_from_output(output, report.output)
        self._free_held(batch)
        if self._counters is not None:
            self._counters.batch_ended(batch.num_tokens, batch.num_joined(self.requests))
        return outputs

    def _fail(self, batch: PrefillBatch, error: str) -> dict[int, EngineCoreOutputs]:
        """End the requests of a batch that raised; the engine goes on."""
        alive = self._leave_lane(batch)
        if self._batches:  # what follows may have hit its blocks: back to the queue
            self._preempt(self._drop_batches())
        if self._counters is not None:
            self._counters.batches_left(FAILED)
        logger.error("prefill failed (%s); ended with an error: %s", error, ", ".join(r.request_id for r in alive))
        self.finish_requests([request.request_id for request in alive], RequestStatus.FINISHED_ERROR)
        return outputs_of_ended(alive)

    def _drop_batches(self) -> list[Request]:
        """Abandon all batches in the lane; those of their requests that are alive, in the order of admission.

        Their blocks may be freed and reused at once: the worker drops them before it runs the step that reuses blocks.
        """
        self._drop = self._batches[-1].id
        if self._counters is not None:
            self._counters.batches_left(DROPPED, len(self._batches))
        alive: dict[str, Request] = {}
        while self._batches:
            batch = self._batches.popleft()
            alive |= {request.request_id: request for request in self._leave_lane(batch)}
        return list(alive.values())

    def _preempt(self, requests: list[Request]) -> None:
        now = time.monotonic()
        for request in reversed(requests):
            if request.status == RequestStatus.RUNNING:  # else its next chunk has found no blocks: it waits already
                self.running.remove(request)
                self._preempt_request(request, now, drop_stale_output=True)

    def _leave_lane(self, batch: PrefillBatch) -> list[Request]:
        """Undo what an unfinished batch has left in the books, before its requests are ended or preempted."""
        alive = self._taken_back(batch)
        self._free_held(batch)
        return alive

    def _taken_back(self, batch: PrefillBatch) -> list[Request]:
        """Its requests, as if the batch had never been scheduled; the blocks that it holds stay."""
        alive = batch.alive(self.requests)
        for request in alive:
            # No output will come for these tokens.
            request.num_in_flight_tokens -= batch.output.num_scheduled_tokens[request.request_id]
            # Stock resumes a preempted request when its stale output has come.
            request.num_stale_output_tokens = min(request.num_stale_output_tokens, request.num_in_flight_tokens)
        # vLLM has committed the hashes of blocks that were never computed. Those before them, of a prefix that others
        # share or of earlier chunks, stay in the prefix cache.
        with not_announced(self.kv_cache_manager.block_pool):
            self.kv_cache_manager.evict_blocks(batch.new_blocks)
        return alive

    def _free_held(self, batch: PrefillBatch) -> None:
        for blocks in batch.held_blocks:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))  # tail blocks are evicted first
        batch.held_blocks.clear()

    # --- what may happen to a request in the lane ------------------------------------------------------------------

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if self._batches and not any(batch.alive(self.requests) for batch in self._batches):
            self._drop_batches()
        return finished

    def _free_request_blocks(self, request: Request) -> None:
        for batch in reversed([*self._lost, *self._batches]):
            if batch.requests.get(request.request_id) is request:
                # Layers that read and write them are still to run.
                batch.held_blocks.append(self.kv_cache_manager.pop_blocks_for_free(request))
                return
        super()._free_request_blocks(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._prefill_prev_step.discard(request.request_id)  # it leaves the batch, whether the lane has another or not

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            self._prefill_prev_step.clear()
            if self._batches:
                self._drop_batches()  # stock preempts all that run, which those of the batch now do
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def has_requests(self) -> bool:
        """Also while the worker has still to be told to drop a batch: a paused engine would otherwise keep a forward
        half run, with its weights about to be exchanged."""
        return super().has_requests() or self._drop is not None

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.PAUSED_ALL and self._batches:
            # A paused engine may get other weights: the chunks in the lane start again when the engine resumes.
            self._preempt(self._drop_batches())
