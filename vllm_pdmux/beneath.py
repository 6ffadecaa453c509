# SPDX-License-Identifier: Apache-2.0
"""What the mixins use of the vLLM classes that they are put over, for the type checker alone.

When the program runs both names are `object`: a method here would hide vLLM's. `internals` has the same names and is
what is checked against vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import LoRAConfig, ParallelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    class SchedulerBeneath:
        """vLLM's scheduler."""

        vllm_config: VllmConfig
        parallel_config: ParallelConfig
        use_v2_model_runner: bool
        log_stats: bool
        policy: SchedulingPolicy
        lora_config: LoRAConfig | None
        block_size: int
        requests: dict[str, Request]
        running: list[Request]
        waiting: RequestQueue
        kv_holding_waiting: RequestQueue
        num_waiting_for_streaming_input: int
        max_num_active_reqs: int
        max_num_scheduled_tokens: int
        prefill_capacity_bound: bool
        finished_req_ids: set[str]
        reset_preempted_req_ids: set[str]
        prev_step_scheduled_req_ids: set[str]
        kv_cache_manager: KVCacheManager
        _pause_state: PauseState

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput: ...
        def update_from_output(
            self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> dict[int, EngineCoreOutputs]: ...
        def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None: ...
        def make_stats(self, *args: Any, **kwargs: Any) -> Any: ...
        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[Request]: ...
        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool: ...
        def set_pause_state(self, pause_state: PauseState) -> None: ...
        def has_requests(self) -> bool: ...
        def shutdown(self) -> None: ...
        def _free_request_blocks(self, request: Request) -> None: ...
        def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None: ...

    class WorkerBeneath:
        """vLLM's worker."""

        vllm_config: VllmConfig
        model_runner: Any  # one of two classes that share no base

        def init_device(self) -> None: ...
        def load_model(self, **kwargs: Any) -> None: ...
        def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None: ...
        def execute_model(self, scheduler_output: SchedulerOutput) -> Any: ...
        def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any: ...
        def add_lora(self, lora_request: LoRARequest) -> bool: ...
        def remove_lora(self, lora_id: int) -> bool: ...
        def pin_lora(self, lora_id: int) -> bool: ...
        def reload_weights(self, *args: Any, **kwargs: Any) -> None: ...
        def finish_weight_update(self) -> None: ...
        def shutdown(self) -> None: ...
else:
    SchedulerBeneath = WorkerBeneath = object
