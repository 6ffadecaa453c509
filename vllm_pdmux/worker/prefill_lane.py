# SPDX-License-Identifier: Apache-2.0
"""The prefill lane of one worker: obeys the scheduler's orders and reports what it did."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_pdmux.messages import LaneReport, PrefillOrder
from vllm_pdmux.worker import handover
from vllm_pdmux.worker.lane import Lane, SerialLane, ThreadedLane
from vllm_pdmux.worker.prefill_runner import build_prefill_runner
from vllm_pdmux.worker.process_state import ForwardContextSwap

logger = init_logger("vllm.pdmux.lane")


def build_lane(kind: str) -> Lane:
    """The lane of the setting ``lane``: "threaded" or "serial"."""
    if kind == "serial":
        return SerialLane()
    state = ForwardContextSwap()
    return ThreadedLane(switch_in=state.swap, switch_out=state.swap, keep_thread=torch.accelerator.is_available())


class PrefillLane:
    """Runs one prefill batch at a time on the second runner, some layers per engine step.

    Called from the worker's thread only, between or after the decode lane's work, never during it.
    """

    def __init__(self, decode_runner: Any, kind: str):
        self._decode_runner = decode_runner
        self._lane = build_lane(kind)
        self._runner, self._view = build_prefill_runner(decode_runner, self._lane)
        self._batch_id: int | None = None  # the batch in the lane
        self._batch_req_ids: list[str] = []
        self._finished_req_ids: set[str] = set()  # finished while a batch was in the lane

    def before_decode(self, output: SchedulerOutput, order: PrefillOrder) -> None:
        """What must happen before the decode lane runs the step `output`: drops, and requests that change lanes."""
        if order.drop is not None and order.drop == self._batch_id:
            self._lane.drop()
            self._leave()
        self._finished_req_ids |= output.finished_req_ids
        if self._batch_id is None:
            self._forget_finished()
        handover.move(output.num_scheduled_tokens, self._runner, self._decode_runner)

    def advance(self, order: PrefillOrder) -> LaneReport | None:
        """Begin the order's batch if it brings one, and run its layers. None when there was nothing to run."""
        if order.start is not None:
            self._begin(order)
        if order.batch_id is None or order.batch_id != self._batch_id:
            return None  # the batch ended before the scheduler knew (async scheduling looks one step ahead)
        first_layer, start = self._lane.layer, time.perf_counter()
        ended = self._lane.advance(order.layers)
        output, error = self._take() if ended else (None, None)
        advance_ms = (time.perf_counter() - start) * 1e3
        return LaneReport(order.batch_id, first_layer, self._lane.layer, advance_ms, output, error)

    def close(self) -> None:
        """Stop the lane's thread; a batch in progress is abandoned."""
        self._lane.close()

    def _begin(self, order: PrefillOrder) -> None:
        assert order.start is not None and self._batch_id is None, "the lane runs one batch at a time"
        handover.move(order.start.num_scheduled_tokens, self._decode_runner, self._runner)
        self._batch_id, self._batch_req_ids = order.batch_id, list(order.start.num_scheduled_tokens)
        self._view.begin()
        self._lane.start(lambda: self._run(order.start, order.grammar))

    def _run(self, output: SchedulerOutput, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """The job: a stock step of the second runner. Runs on the lane's thread."""
        result = self._runner.execute_model(output)
        return self._runner.sample_tokens(grammar) if result is None else result

    def _take(self) -> tuple[ModelRunnerOutput | None, str | None]:
        req_ids = self._batch_req_ids
        try:
            return self._lane.take(), None
        except Exception as error:  # noqa: BLE001 - whatever the forward raised ends this batch, not the engine
            logger.exception("prefill batch %s failed; its requests are %s", self._batch_id, ", ".join(req_ids))
            return None, f"{type(error).__name__}: {error}"
        finally:
            self._leave()

    def _leave(self) -> None:
        self._batch_id, self._batch_req_ids = None, []
        self._forget_finished()

    def _forget_finished(self) -> None:
        handover.forget(self._finished_req_ids, self._runner)
        self._finished_req_ids.clear()
