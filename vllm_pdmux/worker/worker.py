# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's own, with a prefill lane beside its runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from vllm_pdmux.activation import settings_of
from vllm_pdmux.messages import PrefillOrder, attach_report, order_of
from vllm_pdmux.worker.prefill_lane import PrefillLane

_NOTHING = PrefillOrder()


class PDMuxWorkerMixin:
    """Runs the decode lane's step as the stock worker does, then the layers that the order asks for.

    The layers come last: on a GPU they are queued behind a decode step that is under way already, and on a CPU the
    decode tokens of the step are sampled before any layer can raise.
    """

    _prefill_lane: PrefillLane | None = None
    _order: PrefillOrder = _NOTHING  # of the step between execute_model and sample_tokens

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        settings = settings_of(self.vllm_config)  # type: ignore[attr-defined]
        self._prefill_lane = PrefillLane(self.model_runner, settings.lane)  # type: ignore[attr-defined]

    @torch.inference_mode()  # moving a request between the runners writes to their inference tensors
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        assert self._prefill_lane is not None
        self._order = order_of(scheduler_output) or _NOTHING
        self._prefill_lane.before_decode(scheduler_output, self._order)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        return None if output is None else self._advance(output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        return self._advance(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._prefill_lane is not None:
            self._prefill_lane.close()
        super().shutdown()  # type: ignore[misc]

    def _advance(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        assert self._prefill_lane is not None
        report = self._prefill_lane.advance(self._order)
        return output if report is None else attach_report(output, report)
