# SPDX-License-Identifier: Apache-2.0
"""The scheduler: vLLM's own, called once for each lane with the other lane's requests hidden.

A request is in exactly one lane. It is admitted in the prefill view, hidden while its batch is in the lane, and enters
the decode view when the batch has reported: from then on it is a running request like any other. When one of the two
lanes has nothing to do, the step is stock vLLM's.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_pdmux.activation import require_active, settings_of
from vllm_pdmux.admission import Admission
from vllm_pdmux.calibration.chosen import chosen_profile, prior_of
from vllm_pdmux.entering import DECODE, PREFILL, Entering
from vllm_pdmux.losing import Losing
from vllm_pdmux.messages import LaneReport, PrefillOrder, attach_order, order_of, report_of
from vllm_pdmux.metrics import wire
from vllm_pdmux.metrics.counters import Counters
from vllm_pdmux.metrics.fused_reason import attach_reason
from vllm_pdmux.mixed_graphs import mixed_graph_tokens
from vllm_pdmux.model_size import decode_alone, prompt_work
from vllm_pdmux.observer import Observer
from vllm_pdmux.outputs import merge_outputs
from vllm_pdmux.pace import Pace
from vllm_pdmux.policy import PromptWork
from vllm_pdmux.policy_from_config import build_policy, max_prefill_tokens
from vllm_pdmux.prefill_batch import PrefillBatch
from vllm_pdmux.residency import Residency
from vllm_pdmux.step_times import StepTime, StepTimes
from vllm_pdmux.trace import StepTrace
from vllm_pdmux.trace_file import TraceFile, path_of_engine

logger = init_logger("vllm.pdmux.scheduler")


def _say(text: str) -> None:
    logger.info("PD-multiplexing %s", text)


def _warn(text: str) -> None:
    logger.warning("PD-multiplexing: %s", text)


class PDMuxSchedulerMixin(Entering, Losing):
    """Over one of vLLM's schedulers. It hides requests and delegates; no scheduling is done here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_active(self.vllm_config)
        settings = settings_of(self.vllm_config)
        # The device may have fewer groups; the worker says so at start and runs higher numbers in its last one.
        is_gpu = self.vllm_config.device_config.device_type == "cuda"
        splits, learns = settings.sm_group_num - 2, settings.policy == "slo"
        alone, prior, graphs, self._prompt_work = None, None, 0, PromptWork()
        if learns:
            alone, self._prompt_work = decode_alone(self.vllm_config), prompt_work(self.vllm_config)
            graphs = mixed_graph_tokens(self.vllm_config)
            if profile := chosen_profile(self.vllm_config, settings, _say, _warn):
                prior, self._prompt_work = prior_of(profile, splits), profile.prompt_work
        self._pdmux_policy = build_policy(settings, splits, is_gpu, alone, self._prompt_work, _warn, prior, graphs)
        self._residency = Residency() if self.use_v2_model_runner else None
        self._model_layers = self.vllm_config.model_config.get_num_layers(self.parallel_config)
        self._step_times = StepTimes()
        self._trace_file = None
        if settings.trace_file is not None:
            path = path_of_engine(Path(settings.trace_file), self.parallel_config.data_parallel_index)
            self._trace_file = TraceFile(path, _warn)
        self.pdmux_trace = StepTrace(settings.trace_steps, [self._trace_file.add] if self._trace_file else [])
        self._counters = Counters(splits, learns) if self.log_stats and wire.is_read(os.environ) else None
        self._shares = wire.Shares()
        judge = self._counters.judge if self._counters is not None else None
        observes = self._pdmux_policy.observes
        self._observer = Observer(self._pdmux_policy, self._prompt_work, judge) if observes else None
        self._batches: deque[PrefillBatch] = deque()  # in the lane, in order
        # A GPU must not run dry between two batches. (A V1 runner could not resume what was dropped before it began.)
        self._admission = Admission(
            self._model_layers,
            max_batches=2 if is_gpu and self.use_v2_model_runner else 1,
            most_tokens=max_prefill_tokens(settings, has_streams=is_gpu),
        )
        self._pace = Pace() if is_gpu and self.parallel_config.world_size > 1 else None
        self._next_batch_id = 0
        self._overtaken = False
        self._drop: int | None = None  # the last batch that the worker has still to be told to drop
        self._lose: int | None = None  # the same, to lose
        self._lost: list[PrefillBatch] = []
        self._prefill_prev_step: set[str] = set()
        logger.info(
            "PD-multiplexing scheduler: %s, policy %s, lane %s",
            "asynchronous" if isinstance(self, AsyncScheduler) else "synchronous",
            settings.policy,
            settings.lane,
        )

    # --- one engine step -------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """The decode lane's step, with the order for the prefill lane on it."""
        if self._residency is not None:
            self._residency.forget(self.finished_req_ids | self.reset_preempted_req_ids)
        if not self._batches and not self._both_lanes_have_work(throttle_prefills):
            return self._stock_step(throttle_prefills)
        if not self._batches and self._may_fuse() and (tokens := self._tokens_of_fused_step()):
            # Stock serves them in order until the tokens are used up, which are enough for all that decode.
            self.running.sort(key=lambda request: request.is_prefill_chunk)
            with self._limited_to(tokens):
                output = self._stock_step(throttle_prefills)
            return output if self._counters is None else attach_reason(output, self._pdmux_policy)
        finished, self.finished_req_ids = self.finished_req_ids, set()  # for the view that goes to both runners
        preempted: set[str] = set()
        begun = None
        if self._lane_has_room():
            begun, preempted = self._begin_batch()
        self.finished_req_ids |= finished
        self.reset_preempted_req_ids |= preempted
        output = self._localise(self._schedule_decode(), DECODE)
        return self._with_order(output, self._order_for(output, begun))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Both lanes' results of a step, as one set of outputs."""
        said = report_of(model_runner_output)
        report = said if said is not None and said.is_of_layers else None
        order = order_of(scheduler_output) or PrefillOrder()
        if (took := self._step_times.done(scheduler_output, report)) is not None:
            self._tell_of(scheduler_output, took, order, report)
        elif order.abandoned is not None:
            self.pdmux_trace.record(scheduler_output, self._step_times.now(), order, report)
        if self._pace is not None and order.batch_id is not None:
            self._pace.reported(order.layers, report)
        if report is not None and scheduler_output.num_scheduled_tokens:  # else all layers are launched at once
            self._admission.launched(report.launched_layers)
        from_lane = {} if report is None else self._update_lane(report)
        if said is not None:
            from_lane = merge_outputs(from_lane, self._heard_of_lane(said))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._counters is not None:
            self._counters.look_at(self._pdmux_policy, len(self._batches))
            wire.attach(outputs, self._counters.values, self._shares)
        return merge_outputs(outputs, from_lane)

    def _tell_of(self, output: SchedulerOutput, took: StepTime, order: PrefillOrder, report: LaneReport | None) -> None:
        """A step with something in it has come back."""
        if self._counters is not None:  # before the observer, which has the step judged
            self._counters.done(output, took, order, report)
        if self._observer is not None:
            is_saturated = report is not None and report.is_saturated
            self._observer.done(output, took, self._work_through(report), is_saturated)
        self.pdmux_trace.record(output, took, order, report)

    def _stock_step(self, throttle_prefills: bool) -> SchedulerOutput:
        """A step of the stock scheduler, all requests visible."""
        return self._with_order(self._localise(super().schedule(throttle_prefills), DECODE), PrefillOrder())

    def _with_order(self, output: SchedulerOutput, order: PrefillOrder) -> SchedulerOutput:
        order = replace(self._take_abandoned(order), ended=self._last_ended())
        if self._observer is not None:
            self._observer.scheduled(output, order, self.requests)
        self._step_times.scheduled(output)
        return attach_order(output, order)

    def _last_ended(self) -> int:
        """The last batch that has left the lane."""
        return (self._batches[0].id if self._batches else self._next_batch_id) - 1

    def _both_lanes_have_work(self, throttle_prefills: bool) -> bool:
        if self._pause_state == PauseState.PAUSED_ALL or self._lost:
            return False
        if self._residency is not None and (bound := self._bound_lane()):
            return bound == PREFILL
        if throttle_prefills and not self.prefill_capacity_bound:
            return False
        return any(not request.is_prefill_chunk for request in self.running) and self._anything_to_prefill()

    def _schedule_decode(self) -> SchedulerOutput:
        in_lane = {req_id for batch in self._batches for req_id in batch.requests}
        decoding: list[Request] = []
        others: list[Request] = []
        for request in self.running:
            is_decoding = not request.is_prefill_chunk and request.request_id not in in_lane
            (decoding if is_decoding else others).append(request)
        capacity_bound = self.prefill_capacity_bound
        with self._visible(decoding, hidden_after=others), self._hidden_queues():
            output = super().schedule()
        self.prefill_capacity_bound = capacity_bound
        return output

    def _order_for(self, output: SchedulerOutput, begun: PrefillBatch | None) -> PrefillOrder:
        if not self._batches:
            return PrefillOrder()
        last = self._batches[-1]
        load = self._load_beside(output, last)
        decision = self._pdmux_policy.decide(load)
        layers = decision.layers
        if self._pace is not None:
            layers = self._pace.layers(layers, is_first=begun is not None)
        if begun is None:
            return PrefillOrder(last.id, layers, group=decision.group)
        return PrefillOrder(begun.id, layers, begun.output, begun.grammar, decision.group)

    def _take_abandoned(self, order: PrefillOrder) -> PrefillOrder:
        """`order`, with what is left for the worker to abandon."""
        if self._drop is None and self._lose is None:
            return order
        drop, self._drop = self._drop, None
        lose, self._lose = self._lose, None
        return replace(order, drop=drop, lose=lose)

    def shutdown(self) -> None:
        if self._trace_file is not None:
            self._trace_file.close()
        super().shutdown()


class PDMuxScheduler(PDMuxSchedulerMixin, StockScheduler):
    """For engines that schedule synchronously."""


class PDMuxAsyncScheduler(PDMuxSchedulerMixin, AsyncScheduler):
    """For engines that schedule the next step while this one runs."""


class Scheduler:
    """``--scheduler-cls vllm_pdmux.Scheduler``: the class that fits the engine's ``async_scheduling``."""

    def __new__(cls, *args: Any, vllm_config: Any, **kwargs: Any) -> Any:
        require_active(vllm_config)
        chosen = PDMuxAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PDMuxScheduler
        return chosen(*args, vllm_config=vllm_config, **kwargs)
