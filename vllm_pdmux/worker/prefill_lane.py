# SPDX-License-Identifier: Apache-2.0
"""The prefill lane of one worker: obeys the scheduler's orders and reports what it did."""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_pdmux.messages import LaneReport, PrefillOrder
from vllm_pdmux.worker.handover import handover_for
from vllm_pdmux.worker.lane import Lane, SerialLane, ThreadedLane
from vllm_pdmux.worker.lane_device import LaneDevice
from vllm_pdmux.worker.prefill_runner import build_prefill_runner
from vllm_pdmux.worker.process_state import ForwardContextSwap

logger = init_logger("vllm.pdmux.lane")


def build_lane(kind: str, keep_thread: bool) -> Lane:
    """The lane of the setting ``lane``: "threaded" or "serial"."""
    if kind == "serial":
        return SerialLane()
    state = ForwardContextSwap()
    return ThreadedLane(switch_in=state.swap, switch_out=state.swap, keep_thread=keep_thread)


class PrefillLane:
    """Runs one prefill batch at a time on the second runner, some layers per engine step.

    Called from the worker's thread only, between or after the decode lane's work, never during it.
    """

    def __init__(self, decode_runner: Any, kind: str, device: LaneDevice):
        self._decode_runner = decode_runner
        self._device = device
        self._handover = handover_for(decode_runner.vllm_config)
        self._lane = build_lane(kind, device.keep_thread)
        self._runner, self._view = build_prefill_runner(decode_runner, self._at_layer)
        self._batch_id: int | None = None  # the batch in the lane
        self._batch_req_ids: list[str] = []
        self._output: Any = None  # of the batch, when all of it is launched
        self._finished_req_ids: set[str] = set()  # finished while a batch was in the lane

    def before_decode(self, output: SchedulerOutput, order: PrefillOrder) -> None:
        """What must happen before the decode lane runs the step `output`: drops, and requests that change lanes."""
        if order.drop is not None and order.drop == self._batch_id:
            self._lane.drop()
            self._device.drop()
            self._leave()
        self._finished_req_ids |= self._handover.gone(output)
        if self._batch_id is None:
            self._forget_finished()
        self._handover.move(output.num_scheduled_tokens, self._runner, self._decode_runner)

    def advance(self, order: PrefillOrder, wait: bool) -> LaneReport | None:
        """Begin the order's batch if it brings one, and launch its layers. None when there was nothing to run.

        `wait`: nothing decodes, so a batch that is launched is reported as ended at once, with an output that may have
        to be waited for.
        """
        if order.start is not None:
            self._begin(order)
        if order.batch_id is None or order.batch_id != self._batch_id:
            return None  # the batch ended before the scheduler knew (async scheduling looks one step ahead)
        first_layer, start = self._lane.layer, time.perf_counter()
        output, error = None, None
        if self._output is None and self._launch(order.layers, wait):
            self._output, error = self._take()
        end_layer = self._lane.layer
        if self._output is not None and (wait or self._device.is_done(self._output)):
            output = self._output
        if output is not None or error is not None:
            self._leave()
        advance_ms = (time.perf_counter() - start) * 1e3
        return LaneReport(order.batch_id, first_layer, end_layer, advance_ms, output, error)

    def close(self) -> None:
        """Stop the lane's thread; a batch in progress is abandoned."""
        self._lane.close()

    def _begin(self, order: PrefillOrder) -> None:
        assert order.start is not None and self._batch_id is None, "the lane runs one batch at a time"
        self._handover.move(order.start.num_scheduled_tokens, self._decode_runner, self._runner)
        self._batch_id, self._batch_req_ids = order.batch_id, list(order.start.num_scheduled_tokens)
        self._view.begin()
        self._device.begin(order.group, self._runner)
        self._lane.start(lambda: self._run(order.start, order.grammar))

    def _run(self, output: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        """The job: a stock step of the second runner. Runs on the lane's thread."""
        self._device.enter()
        result = self._runner.execute_model(output)
        return self._runner.sample_tokens(grammar) if result is None else result

    def _launch(self, layers: int, wait: bool) -> bool:
        """Launch `layers` layers, fewer where the device has enough queued; whether all of the batch is launched."""
        end, stride, ended = self._lane.layer + layers, layers if wait else self._device.stride(layers), False
        while not ended and self._lane.layer < end and (wait or self._device.wants_more()):
            ended = self._lane.advance(stride)
        return ended

    def _at_layer(self) -> None:
        self._device.mark()
        self._lane.at_layer()

    def _take(self) -> tuple[Any, str | None]:
        try:
            return self._lane.take(), None
        except Exception as error:  # noqa: BLE001 - whatever the forward raised ends this batch, not the engine
            req_ids = ", ".join(self._batch_req_ids)
            logger.exception("prefill batch %s failed; its requests are %s", self._batch_id, req_ids)
            return None, f"{type(error).__name__}: {error}"

    def _leave(self) -> None:
        self._batch_id, self._batch_req_ids, self._output = None, [], None
        self._forget_finished()

    def _forget_finished(self) -> None:
        self._handover.forget(self._finished_req_ids, self._runner)
        self._finished_req_ids.clear()
