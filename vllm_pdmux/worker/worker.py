# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's own, with a prefill lane beside its runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_pdmux.activation import settings_of
from vllm_pdmux.beneath import WorkerBeneath
from vllm_pdmux.messages import LaneReport, PrefillOrder, attach_report, order_of
from vllm_pdmux.worker.communicators import LaneCommunicators
from vllm_pdmux.worker.lane_device import HostDevice, LaneDevice
from vllm_pdmux.worker.launched import PendingReport
from vllm_pdmux.worker.prefill_lane import PrefillLane
from vllm_pdmux.worker.watchdog import Watchdog

logger = init_logger("vllm.pdmux.worker")

_NOTHING = PrefillOrder()


class ReportingOutput(AsyncModelRunnerOutput):
    """A step's output that is still being copied from the GPU, the lane's report to be put on it."""

    def __init__(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput, report: PendingReport, unconfined_steps: int
    ):
        self._output = output
        self._report, self._unconfined_steps = report, unconfined_steps

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the decode lane's result of the step, and say which batch has ended by then."""
        output = _resolved(self._output)
        report = self._report.whole(unconfined_steps=self._unconfined_steps)
        return attach_report(output, report if report.output is None else _with_tokens(report))

    def get_kv_connector_output(self) -> None:
        """KV connectors are refused at start."""


def _resolved(output: ModelRunnerOutput | AsyncModelRunnerOutput) -> ModelRunnerOutput:
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


def _with_tokens(report: LaneReport) -> LaneReport:
    """The report of a batch that has ended, its output read. What is raised then ends the batch, not the engine."""
    try:
        return replace(report, output=_resolved(report.output))
    except Exception as error:
        logger.exception("the first tokens of prefill batch %s could not be read", report.batch_id)
        return replace(report, output=None, error=f"{type(error).__name__}: {error}")


class PDMuxWorkerMixin(WorkerBeneath):
    """Runs the decode lane's step as the stock worker does, then the layers that the order asks for.

    The layers come last: on a GPU they are queued behind a decode step that is under way already, and on a CPU the
    decode tokens of the step are sampled before any layer can raise.
    """

    _prefill_lane: PrefillLane | None = None
    _watchdog: Watchdog | None = None
    _communicators: LaneCommunicators | None = None  # of the prefill lane, where there are several ranks
    _order: PrefillOrder = _NOTHING  # of the step between execute_model and sample_tokens

    def init_device(self) -> None:
        super().init_device()
        is_one_of_many = self.vllm_config.parallel_config.world_size > 1
        if is_one_of_many and settings_of(self.vllm_config).lane != "serial":  # in which nothing overlaps
            self._communicators = LaneCommunicators()  # before memory is measured, since they take some

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self._communicators is not None:
            self._communicators.check(self.model_runner.get_model())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        settings = settings_of(self.vllm_config)
        runner = self.model_runner
        lane = self._prefill_lane = PrefillLane(runner, settings.lane, self._lane_device(), self._communicators)
        logger.info(
            "PD-multiplexing worker: %s, Model Runner %s, lane %s",
            type(self).__name__,
            "V2" if self.vllm_config.use_v2_model_runner else "V1",
            settings.lane,
        )
        if settings.watchdog_s:
            action = settings.watchdog_action
            looks_at = lane.progress, lane.describe, lane.give_up
            self._watchdog = Watchdog(settings.watchdog_s, action, *looks_at, bind=lane.bind)
            self._watchdog.start()

    def _lane_device(self) -> LaneDevice:
        return HostDevice()

    def _before_decode(self, output: SchedulerOutput, order: PrefillOrder) -> None:
        """What the device needs to know before the decode lane runs its step `output`."""

    def _unconfined_steps(self) -> int:
        """Steps of disjoint groups so far that found no CUDA graph of their size."""
        return 0

    @torch.inference_mode()  # moving a request between the runners writes to their inference tensors
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self._prefill_lane is None or (order := order_of(scheduler_output)) is None:
            return super().execute_model(scheduler_output)  # vLLM's own warm-up
        self._order = order
        self._prefill_lane.before_decode(scheduler_output, order)
        self._before_decode(scheduler_output, order)
        output = super().execute_model(scheduler_output)
        if output is None:
            return None
        return self._advance(output, nothing_decodes=scheduler_output.total_num_scheduled_tokens == 0)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        return self._advance(super().sample_tokens(grammar_output), nothing_decodes=False)

    # What may give another adapter the slot of one that a suspended prompt uses. Each of them stops decode as well.

    def add_lora(self, lora_request: Any) -> bool:
        self._finish_prefill()
        return super().add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        self._finish_prefill()
        return super().remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        self._finish_prefill()
        return super().pin_lora(lora_id)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._keep_adapters()
        super().reload_weights(*args, **kwargs)

    def finish_weight_update(self) -> None:
        self._keep_adapters()
        super().finish_weight_update()

    def _keep_adapters(self) -> None:
        if self.vllm_config.lora_config is not None:
            self._finish_prefill()

    def _finish_prefill(self) -> None:
        if self._prefill_lane is not None:
            self._prefill_lane.finish_current()

    def shutdown(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._prefill_lane is not None:
            self._prefill_lane.close()
        if self._communicators is not None:
            self._communicators.destroy()
        super().shutdown()

    def _advance(self, output: Any, nothing_decodes: bool) -> Any:
        order, self._order = self._order, _NOTHING
        if (lane := self._prefill_lane) is None:
            return output
        report = lane.advance(order, wait=nothing_decodes)
        if report is None:
            return output
        unconfined_steps = self._unconfined_steps()
        reporting = ReportingOutput(output, report, unconfined_steps)
        # Under asynchronous scheduling also where there is nothing to wait for: the steps before have yet to say which
        # batches have ended. Model Runner V2 has its outputs read later under either scheduling.
        is_read_later = isinstance(output, AsyncModelRunnerOutput) or self.vllm_config.scheduler_config.async_scheduling
        return reporting if is_read_later else reporting.get_output()
