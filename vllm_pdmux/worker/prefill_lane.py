# SPDX-License-Identifier: Apache-2.0
"""The prefill lane of one worker: obeys the scheduler's orders and reports what it did."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.workspace import use_workspace_lane

from vllm_pdmux.messages import LaneReport, PrefillOrder, Run
from vllm_pdmux.policy import ALL_LAYERS
from vllm_pdmux.worker.communicators import LaneCommunicators
from vllm_pdmux.worker.handover import handover_for
from vllm_pdmux.worker.lane import Lane, SerialLane, ThreadedLane
from vllm_pdmux.worker.lane_device import LaneDevice, Moment, Passed
from vllm_pdmux.worker.launched import Batch, Launched, LaunchedBatches, PendingReport
from vllm_pdmux.worker.lora_state import lora_state_of
from vllm_pdmux.worker.prefill_runner import build_prefill_runner, dummy_prefill
from vllm_pdmux.worker.process_state import ProcessState

logger = init_logger("vllm.pdmux.lane")

ALONE = 0  # the group with all SMs for prefill


def build_lane(kind: str, keep_thread: bool, state: ProcessState) -> Lane:
    """The lane of the setting ``lane``: "threaded" or "serial". `state`: what changes hands with control."""
    if kind == "serial":
        return SerialLane()
    return ThreadedLane(switch_in=state.swap, switch_out=state.swap, keep_thread=keep_thread)


class RankFailed(SystemExit):
    """Ends the process of a rank, and with it the engine: the other ranks cannot be told to leave a collective.

    No Exception, for vLLM would go on without this rank's part, and the others would wait for it.
    """


class PrefillLane:
    """Runs prefill batches one after the other on the second runner, some layers per engine step.

    A batch is queued, then current (its layers are being launched), then launched (no step has reported its end).
    Called from the worker's thread only, between or after the decode lane's work, never during it; reports become whole
    on whatever thread waits for the outputs of steps.

    With several ranks each has such a lane, and all launch the same: what is launched, and which requests a runner
    knows, follows from the orders alone.
    """

    def __init__(
        self, decode_runner: Any, kind: str, device: LaneDevice, communicators: LaneCommunicators | None = None
    ):
        self._decode_runner = decode_runner
        self._device = device
        self._handover = handover_for(decode_runner.vllm_config)
        self._lora = lora_state_of(decode_runner)
        state = ProcessState(one for one in (communicators, self._lora) if one is not None)
        self._lane = build_lane(kind, device.keep_thread, state)
        with use_workspace_lane(device.workspace):  # some attention backends reserve scratch when they are built
            self._runner, self._view = build_prefill_runner(decode_runner, self._at_layer)
        self._queue: deque[Batch] = deque()
        self._admitted_at: Any = None  # the moment of the device before the step that brings a batch
        self._current: Batch | None = None
        self._launched = LaunchedBatches(lambda output: self._device.is_done(output))
        self._in_lane: dict[int, Batch] = {}  # of which no order has said that they have left it
        self._step = 0
        self._order, self._decoding = PrefillOrder(), 0  # of the last step
        self._finished_req_ids: set[str] = set()  # finished while their batch was in the lane
        self._queued: Moment = Passed()  # the end of what is queued
        self._behind: Moment = Passed()  # what was dropped or has raised, which the decode lane waits for
        self._stalled: tuple[object, float] | None = None  # what the watchdog saw, and for how long
        self._is_given_up = False  # which has been reported, and no order has answered
        self._lost: tuple[int, Moment] | None = None  # the last lost batch, and the end of what runs of them
        self._decoded: Moment = Passed()  # while there are some: the end of what the decode lane has queued
        self._is_in_step = False
        self._is_one_of_many = decode_runner.vllm_config.parallel_config.world_size > 1

    def before_decode(self, output: SchedulerOutput, order: PrefillOrder) -> None:
        """What must happen before the decode lane runs the step `output`: drops, and requests that change lanes."""
        self._step += 1
        self._is_in_step = True
        self._order, self._decoding = order, len(output.num_scheduled_tokens)
        if order.drop is not None:
            self._leave(order.drop)
            self._make_decode_wait()
        if order.lose is not None:
            self._leave(order.lose)
            self._lost, self._is_given_up = (order.lose, self._device.end()), False
        self._forget_batches(order.ended)
        self._finished_req_ids |= self._handover.gone(output)
        self._forget_finished()
        self._handover.move(output.num_scheduled_tokens, self._runner, self._decode_runner)
        if order.start is not None:
            self._admitted_at = self._device.moment()

    def advance(self, order: PrefillOrder, wait: bool) -> PendingReport | None:
        """Take the order's batch if it brings one, and launch layers. None when there was nothing to run.

        `wait`: nothing decodes, so the step reports the end of a batch that is launched even if that has to be waited
        for. The first batch is then run to its end on all SMs, and no other: what decodes after it would wait for that.
        Nor is it where requests of a batch before it are about to decode: under asynchronous scheduling this step was
        scheduled without knowing what the one before has reported. So the scheduler must know of all before it.
        """
        self._is_in_step = False
        if self._lost is not None:
            self._decoded = self._device.moment()
        if order.batch_id is None:
            return self._back()
        if order.start is not None:
            batch = Batch(order.batch_id, order.start, order.grammar, self._admitted_at)
            self._queue.append(batch)
            self._in_lane[batch.id] = batch
        if self._is_given_up:
            return None  # scheduled before the scheduler knew
        if (stalled_s := self._stands_still_s()) > 0:
            self._is_given_up = True
            report = LaneReport(order.batch_id, stalled_s=stalled_s)
            return PendingReport(report, self._step, None, self._launched)
        next_id = self._current.id if self._current is not None else self._queue[0].id if self._queue else None
        to_its_end = wait and next_id == order.ended + 1
        self._device.use(ALONE if to_its_end else order.group, self._runner)
        if self._current is None and self._queue:
            self._begin(self._queue.popleft())
        was_busy = self._device.is_busy()
        runs = self._launch(order.layers, to_its_end) if self._current is not None else ()
        return self._report(runs, was_busy and self._device.is_busy(), wait)

    def finish_current(self) -> None:
        """Run the batch in progress to its end; the next step reports it."""
        self._launch(ALL_LAYERS, to_its_end=True)

    def warm_up(self, group: int, tokens: int) -> None:
        """Run a prefill batch of `tokens` made-up tokens on the SMs of `group`, so that all it needs there exists."""

        @torch.inference_mode()
        def run() -> None:
            self._device.enter()
            with use_workspace_lane(self._device.workspace):
                dummy_prefill(self._runner, tokens, with_attention=True)

        self._view.begin()
        self._device.use(group, self._runner)
        self._device.begin(self._device.moment())
        self._lane.start(run)
        self._lane.advance(ALL_LAYERS)
        self._lane.take()

    def progress(self) -> object:
        """What differs whenever the lane has come further; None while it has nothing to do. From any thread.

        Of what was dropped too, as long as decode waits for it, and of decode, as long as something runs of what was
        lost: it may wait for that.
        """
        current, launched, is_behind = self._current, self._launched.ids(), not self._behind.query()
        decoding = self._step if self._lost is not None and (self._is_in_step or not self._decoded.query()) else None
        if current is None and not self._queue and not launched and not is_behind and decoding is None:
            return None
        return None if current is None else current.id, self._lane.layer, launched, is_behind, decoding

    def give_up(self, progress: object, stalled_s: float) -> None:
        """The next step loses what is in the lane, unless that has come further than `progress` by then, or all that is
        queued has run and it was the engine that did not go on. From any thread.

        `stalled_s`: for how long it has not.
        """
        self._stalled = progress, stalled_s

    def bind(self) -> None:
        """On another thread, before it asks for progress."""
        self._device.bind()

    def describe(self) -> str:
        """What it is doing, in one line. From any thread."""
        current, order = self._current, self._order
        doing = "no batch is being launched" if self._behind.query() else "decode waits for layers that were dropped"
        if self._lost is not None:
            doing += f", and something may run yet of the batches up to {self._lost[0]}, which were given up"
        if current is not None:
            requests = ", ".join(current.req_ids)
            tokens = current.output.total_num_scheduled_tokens
            doing = f"layer {self._lane.layer} of batch {current.id} has begun ({tokens} tokens of {requests})"
        last = f"batch {order.batch_id}, {order.layers} layers, group {order.group}, drop up to {order.drop}"
        last += f", give up up to {order.lose}" if order.lose is not None else ""
        waiting = f"{len(self._queue)} batches wait; launched and not reported: {list(self._launched.ids())}"
        return f"{doing}; {waiting}; last step: {self._step}, {self._decoding} requests decoding, order: {last}"

    def close(self) -> None:
        """Stop the lane's thread; a batch in progress is abandoned."""
        self._lane.close()

    def _report(self, runs: tuple[Run, ...], is_saturated: bool, wait: bool) -> PendingReport | None:
        """Of this step. Unless a batch has ended, on one whose layers were launched."""
        launched = self._launched.all()
        in_lane = [run.batch_id for run in runs] + [one.batch.id for one in launched]
        in_lane += [self._current.id] if self._current is not None else []
        if not in_lane:
            return None  # a void order: async scheduling looks one step ahead
        awaited = launched[0] if wait and launched else None
        report = LaneReport(in_lane[0], runs, is_saturated, lead_layers=self._device.lead_layers)
        return PendingReport(report, self._step, awaited, self._launched)

    def _begin(self, batch: Batch) -> None:
        self._handover.move(batch.output.num_scheduled_tokens, self._decode_runner, self._runner)
        self._current = batch
        self._view.begin()
        self._device.begin(batch.after)
        self._lane.start(lambda: self._run(batch))

    def _run(self, batch: Batch) -> Any:
        """The job: a stock step of the second runner. Runs on the lane's thread."""
        self._device.enter()
        try:
            with use_workspace_lane(self._device.workspace):
                result = self._runner.execute_model(batch.output)
                return self._runner.sample_tokens(batch.grammar) if result is None else result
        except BaseException:
            # What is kept between the two would be taken for the next batch's.
            self._runner.execute_model_state = None
            raise

    def _launch(self, layers: int, to_its_end: bool) -> tuple[Run, ...]:
        """Launch `layers` layers, fewer where the device has enough queued; what was run of each batch.

        When all of the batch is launched the next one begins, so that the device does not run dry between them. Or
        launch all that is left of the batch, and nothing else.
        """
        runs: list[Run] = []
        while self._current is not None and (to_its_end or (layers > 0 and self._device.wants_more())):
            batch, first_layer = self._current, self._lane.layer
            ended = self._lane.advance(ALL_LAYERS if to_its_end else self._device.stride(layers))
            output, error = self._take() if ended else (None, None)
            layers -= max(1, self._lane.layer - first_layer)
            if runs and runs[-1].batch_id == batch.id:
                first_layer = runs.pop().first_layer
            runs.append(Run(batch.id, first_layer, self._lane.layer))
            if ended:
                self._launched.add(Launched(batch, self._step, output, error))
                self._current = None
                if to_its_end:
                    break
                if self._queue and error is None:
                    self._begin(self._queue.popleft())
        if runs:
            self._queued = self._device.end()
        return tuple(runs)

    def _at_layer(self) -> None:
        self._device.mark()
        slots = self._lora.slots() if self._lora is not None else {}
        self._lane.at_layer()
        if self._lora is not None:
            self._lora.check(slots)
        self._device.enter()

    def _take(self) -> tuple[Any, str | None]:
        try:
            return self._lane.take(), None
        except Exception as error:  # whatever the forward raised ends this batch, not the engine
            assert self._current is not None
            req_ids = ", ".join(self._current.req_ids)
            logger.exception("prefill batch %s failed; its requests are %s", self._current.id, req_ids)
            if self._is_one_of_many:
                raise RankFailed(f"prefill failed on one rank, and others may wait for it: {error}") from error
            self._make_decode_wait()  # its blocks will be free, and layers may be queued that write to them
            return None, f"{type(error).__name__}: {error}"

    def _stands_still_s(self) -> float:
        """0, or for how long if the lane is where the watchdog saw it, and the device is not through with it."""
        stalled, self._stalled = self._stalled, None
        if stalled is None or stalled[0] != self.progress() or self._queued.query():
            return 0.0
        return stalled[1]

    def _make_decode_wait(self) -> None:
        """For all that is queued in the lane."""
        self._device.drop()
        self._behind = self._device.end()

    def _back(self) -> PendingReport | None:
        """That nothing runs any more of what was lost, once."""
        if self._lost is None or not self._lost[1].query():
            return None
        (last_id, _), self._lost = self._lost, None
        return PendingReport(LaneReport(-1, back=last_id), self._step, None, self._launched)

    def _leave(self, last_id: int) -> None:
        """Launch nothing more of the batches up to this one."""
        if self._current is not None and self._current.id <= last_id:
            self._lane.drop()
            self._current = None
        self._queue = deque(batch for batch in self._queue if batch.id > last_id)
        self._forget_batches(last_id)

    def _forget_batches(self, last_id: int) -> None:
        """Those up to this one have left the lane."""
        self._launched.drop(last_id)
        self._in_lane = {batch_id: batch for batch_id, batch in self._in_lane.items() if batch_id > last_id}

    def _forget_finished(self) -> None:
        if not self._finished_req_ids:
            return
        in_lane = {req_id for batch in self._in_lane.values() for req_id in batch.req_ids}
        self._handover.forget(self._finished_req_ids - in_lane, self._runner)
        self._finished_req_ids &= in_lane
