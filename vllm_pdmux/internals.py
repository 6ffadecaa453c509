# SPDX-License-Identifier: Apache-2.0
"""Every internal of vLLM that we touch, and a check that it is still there.

The check reads vLLM's source and imports nothing of it, so it works for an installed vLLM and for a wheel of another
platform that was only unpacked. It runs at start: a name that is gone is an error that says which, not a crash later.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Internal:
    """A name in vLLM: `owner` is a class or "" for the module; `name` a method, attribute, field or function."""

    module: str
    owner: str
    name: str
    used_in: str

    def describe(self) -> str:
        where = f"{self.module}.{self.owner}" if self.owner else self.module
        return f"{where}.{self.name} (used in vllm_pdmux.{self.used_in})"


def _all(module: str, owner: str, names: str, used_in: str) -> tuple[Internal, ...]:
    return tuple(Internal(module, owner, name, used_in) for name in names.split())


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"

_LORA = "vllm.lora.model_manager"
_LOGGERS = "vllm.v1.metrics.loggers"

_MEASURE, _STAT_LOGGER = "calibration.measure", "metrics.stat_logger"

INTERNALS: tuple[Internal, ...] = (
    # The scheduler: what the views hide, and what a batch in the lane changes.
    *_all(_SCHEDULER, "Scheduler", "schedule update_from_output shutdown", "scheduler"),
    *_all(_SCHEDULER, "Scheduler", "finish_requests reset_prefix_cache set_pause_state has_requests", "leaving"),
    *_all(_SCHEDULER, "Scheduler", "_free_request_blocks _preempt_request", "leaving"),
    *_all(_SCHEDULER, "Scheduler", "make_stats policy lora_config", "hiding"),
    *_all("vllm.v1.core.sched.request_queue", "", "RequestQueue", "hiding"),
    *_all("vllm.v1.core.sched.request_queue", "RequestQueue", "add_request", "hiding"),
    *_all("vllm.config.lora", "LoRAConfig", "max_loras", "hiding"),
    *_all("vllm.v1.request", "Request", "lora_request", "adapters"),
    *_all("vllm.lora.request", "LoRARequest", "lora_int_id", "adapters"),
    *_all(_SCHEDULER, "Scheduler", "get_grammar_bitmask kv_cache_manager", "entering"),
    *_all(_SCHEDULER, "Scheduler", "_pause_state", "scheduler"),
    *_all(_SCHEDULER, "Scheduler", "requests running", "scheduler"),
    *_all(_SCHEDULER, "Scheduler", "waiting kv_holding_waiting prev_step_scheduled_req_ids", "entering"),
    *_all(_SCHEDULER, "Scheduler", "num_waiting_for_streaming_input max_num_active_reqs", "entering"),
    *_all(_SCHEDULER, "Scheduler", "finished_req_ids reset_preempted_req_ids", "scheduler"),
    *_all(_SCHEDULER, "Scheduler", "prefill_capacity_bound parallel_config vllm_config", "scheduler"),
    *_all(_SCHEDULER, "Scheduler", "max_num_scheduled_tokens", "hiding"),
    *_all(_SCHEDULER, "Scheduler", "log_stats", "scheduler"),
    *_all("vllm.v1.core.sched.async_scheduler", "", "AsyncScheduler", "scheduler"),
    *_all("vllm.v1.core.sched.interface", "PauseState", "PAUSED_ALL", "scheduler"),
    *_all("vllm.v1.core.sched.request_queue", "", "create_request_queue", "hiding"),
    *_all("vllm.v1.core.sched.request_queue", "RequestQueue", "prepend_request", "hiding"),
    *_all("vllm.v1.core.sched.request_queue", "RequestQueue", "peek_request", "loads"),
    *_all("vllm.v1.core.sched.request_queue", "SchedulingPolicy", "FCFS", "loads"),
    *_all("vllm.v1.request", "Request", "num_tokens num_computed_tokens arrival_time", "loads"),
    *_all("vllm.config.model", "ModelConfig", "get_head_size get_num_kv_heads get_hidden_size", "model_size"),
    *_all("vllm.config.model", "ModelConfig", "get_num_attention_heads get_vocab_size hf_text_config", "model_size"),
    *_all("vllm.v1.core.kv_cache_manager", "KVCacheManager", "pop_blocks_for_free evict_blocks block_pool", "leaving"),
    *_all("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_block_ids", "entering"),
    *_all("vllm.v1.core.block_pool", "BlockPool", "free_blocks", "leaving"),
    *_all("vllm.v1.core.block_pool", "BlockPool", "kv_event_queue", "kv_events"),
    *_all("vllm.distributed.kv_events", "", "BlockStored", "kv_events"),
    *_all("vllm.v1.core.kv_cache_manager", "KVCacheManager", "kv_cache_config get_block_ids", "kv_events"),
    *_all("vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups", "kv_events"),
    *_all("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", "kv_cache_spec", "kv_events"),
    *_all("vllm.v1.kv_cache_interface", "KVCacheSpec", "block_size", "kv_events"),
    *_all("vllm.v1.request", "Request", "request_id is_prefill_chunk", "scheduler"),
    *_all("vllm.v1.request", "Request", "client_index get_finished_reason take_events trace_headers", "outputs"),
    *_all("vllm.v1.request", "Request", "num_in_flight_tokens num_stale_output_tokens", "leaving"),
    *_all("vllm.v1.request", "RequestStatus", "FINISHED_ERROR", "leaving"),
    *_all("vllm.v1.engine", "EngineCoreOutputs", "outputs finished_requests", "outputs"),
    *_all("vllm.v1.engine", "EngineCoreOutputs", "scheduler_stats", "metrics.wire"),
    *_all("vllm.v1.metrics.stats", "SchedulerStats", "running_lora_adapters", "metrics.wire"),
    *_all("vllm.v1.request", "Request", "status is_prefill_chunk", "prefill_batch"),
    *_all("vllm.v1.request", "RequestStatus", "RUNNING", "prefill_batch"),
    *_all("vllm.v1.engine", "EngineCoreOutput", "request_id new_token_ids finish_reason events", "outputs"),
    *_all("vllm.v1.core.sched.output", "SchedulerOutput", "num_scheduled_tokens finished_req_ids", "scheduler"),
    *_all("vllm.v1.core.sched.output", "SchedulerOutput", "total_num_scheduled_tokens preempted_req_ids", "entering"),
    *_all("vllm.v1.core.sched.output", "GrammarOutput", "grammar_bitmask", "prefill_batch"),
    *_all("vllm.config.model", "ModelConfig", "get_num_layers", "scheduler"),
    *_all("vllm.config.parallel", "ParallelConfig", "data_parallel_index", "scheduler"),
    *_all("vllm.config.scheduler", "SchedulerConfig", "scheduler_cls async_scheduling", "activation"),
    *_all("vllm.config.scheduler", "SchedulerConfig", "enable_chunked_prefill", "support"),
    *_all("vllm.config.vllm", "VllmConfig", "additional_config scheduler_config parallel_config", "activation"),
    *_all("vllm.config.parallel", "ParallelConfig", "worker_cls", "activation"),
    *_all("vllm.platforms.interface", "Platform", "check_and_update_config", "activation"),
    # Metrics: a logger of ours among vLLM's own.
    *_all(_LOGGERS, "", "AggregateStatLoggerBase", _STAT_LOGGER),
    *_all(_LOGGERS, "StatLoggerBase", "record log log_engine_initialized", _STAT_LOGGER),
    *_all(_LOGGERS, "StatLoggerManager", "__init__ stat_loggers engine_indexes", _STAT_LOGGER),
    *_all("vllm.config.model", "ModelConfig", "served_model_name", _STAT_LOGGER),
    *_all("vllm.v1.engine.llm_engine", "LLMEngine", "get_metrics logger_manager", "metrics.offline"),
    *_all("vllm.v1.metrics.reader", "Metric", "name labels", "metrics.offline"),
    *_all("vllm.v1.metrics.reader", "Counter", "value", "metrics.offline"),
    *_all("vllm.v1.metrics.reader", "Gauge", "value", "metrics.offline"),
    *_all("vllm.v1.metrics.reader", "Histogram", "count sum buckets", "metrics.offline"),
    *_all("vllm.config.vllm", "VllmConfig", "device_config", _STAT_LOGGER),
    # Calibration: what drives an engine, puts uncomputed blocks in its prefix cache, and tells engines apart.
    *_all("vllm.v1.engine.llm_engine", "LLMEngine", "engine_core add_request abort_request step", _MEASURE),
    *_all("vllm.v1.engine.core_client", "InprocClient", "engine_core", _MEASURE),
    *_all("vllm.v1.engine.core", "EngineCore", "scheduler request_block_hasher", _MEASURE),
    *_all(_SCHEDULER, "Scheduler", "requests has_requests reset_prefix_cache kv_cache_manager", _MEASURE),
    *_all(_SCHEDULER, "Scheduler", "max_num_scheduled_tokens block_size", _MEASURE),
    *_all("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots free block_pool", _MEASURE),
    *_all("vllm.v1.core.block_pool", "BlockPool", "num_gpu_blocks", _MEASURE),
    *_all("vllm.config.model", "ModelConfig", "get_vocab_size max_model_len", _MEASURE),
    *_all("vllm.config.scheduler", "SchedulerConfig", "max_num_seqs", _MEASURE),
    *_all("vllm.config.model", "ModelConfig", "architecture dtype quantization enforce_eager", "calibration.identity"),
    *_all("vllm.config.model", "ModelConfig", "hf_text_config get_hidden_size get_num_layers", "calibration.identity"),
    *_all("vllm.config.model", "ModelConfig", "get_num_attention_heads get_num_kv_heads", "calibration.identity"),
    *_all("vllm.config.model", "ModelConfig", "get_head_size get_vocab_size", "calibration.identity"),
    *_all("vllm.config.cache", "CacheConfig", "cache_dtype", "calibration.identity"),
    *_all("vllm.config.parallel", "ParallelConfig", "tensor_parallel_size", "calibration.identity"),
    *_all("vllm.platforms.interface", "Platform", "get_device_name num_compute_units", "calibration.identity"),
    *_all("vllm.platforms.interface", "Platform", "get_device_capability", "calibration.identity"),
    *_all("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", "cli.calibrate"),
    *_all("vllm.engine.arg_utils", "EngineArgs", "create_engine_config model", "cli.checks.engine"),
    *_all("vllm.engine.arg_utils", "EngineArgs", "scheduler_cls additional_config", "cli.checks.engine"),
    *_all("vllm.engine.arg_utils", "EngineArgs", "from_cli_args model", "cli.serve_line"),
    *_all("vllm.entrypoints.cli.serve", "ServeSubcommand", "name validate subparser_init", "cli.serve_line"),
    *_all("vllm.utils.argparse_utils", "", "FlexibleArgumentParser", "cli.serve_line"),
    *_all("vllm.v1.engine.llm_engine", "LLMEngine", "add_request step has_unfinished_requests", "verify.answers"),
    # What a config says that we refuse.
    *_all("vllm.config.vllm", "VllmConfig", "model_config cache_config kv_transfer_config", "support"),
    *_all("vllm.config.vllm", "VllmConfig", "ec_transfer_config speculative_config lora_config", "support"),
    *_all("vllm.config.vllm", "VllmConfig", "aux_output_config", "support"),
    *_all("vllm.config.aux_output", "AuxOutputConfig", "enabled", "support"),
    *_all("vllm.config.parallel", "ParallelConfig", "pipeline_parallel_size", "support"),
    *_all("vllm.config.parallel", "ParallelConfig", "tensor_parallel_size nnodes enable_hc_sp", "tensor_parallel"),
    *_all("vllm.config.parallel", "ParallelConfig", "enable_expert_parallel", "tensor_parallel"),
    *_all("vllm.config.parallel", "ParallelConfig", "enable_batch_sharded_sampling", "tensor_parallel"),
    *_all("vllm.config.parallel", "ParallelConfig", "distributed_executor_backend", "tensor_parallel"),
    *_all("vllm.config.parallel", "ParallelConfig", "world_size", "worker.worker"),
    *_all("vllm.config.model", "ModelConfig", "is_moe", "support"),
    *_all("vllm.config.compilation", "CompilationConfig", "mode pass_config", "tensor_parallel"),
    *_all("vllm.config.compilation", "CompilationMode", "NONE", "tensor_parallel"),
    *_all("vllm.config.compilation", "PassConfig", "fuse_allreduce_rms", "tensor_parallel"),
    *_all("vllm.envs", "", "environment_variables", "tensor_parallel"),
    *_all("vllm.config.parallel", "ParallelConfig", "data_parallel_size data_parallel_backend", "support"),
    *_all("vllm.config.parallel", "ParallelConfig", "decode_context_parallel_size", "support"),
    *_all("vllm.config.parallel", "ParallelConfig", "prefill_context_parallel_size use_ubatching", "support"),
    *_all("vllm.config.model", "ModelConfig", "model runner_type is_encoder_decoder is_diffusion", "support"),
    *_all("vllm.config.model", "ModelConfig", "supports_multimodal_inputs enable_prompt_embeds", "support"),
    *_all("vllm.config.model", "ModelConfig", "is_hybrid is_attention_free", "support"),
    *_all("vllm.config.cache", "CacheConfig", "kv_sharing_fast_prefill", "support"),
    *_all("vllm.config.kv_transfer", "KVTransferConfig", "kv_connector", "support"),
    *_all("vllm.config.speculative", "SpeculativeConfig", "method", "support"),
    *_all("vllm.config.vllm", "VllmConfig", "kv_events_config device_config", "support"),
    *_all("vllm.config.device", "DeviceConfig", "device_type", "support"),
    *_all("vllm.config.kv_events", "KVEventsConfig", "enable_kv_cache_events", "support"),
    *_all("vllm.config.model", "ModelConfig", "get_sliding_window", "support"),
    # The worker and its V1 runner.
    *_all("vllm.v1.worker.gpu_worker", "Worker", "initialize_from_config execute_model", "worker.worker"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "sample_tokens shutdown", "worker.worker"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "add_lora remove_lora pin_lora reload_weights", "worker.worker"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "finish_weight_update", "worker.worker"),
    *_all("vllm.config.vllm", "VllmConfig", "lora_config", "worker.worker"),
    *_all("vllm.v1.worker.cpu_worker", "", "CPUWorker", "worker.cpu"),
    *_all(_RUNNER, "GPUModelRunner", "execute_model sample_tokens", "worker.prefill_lane"),
    *_all(_RUNNER, "GPUModelRunner", "initialize_kv_cache initialize_kv_cache_tensors", "worker.prefill_runner"),
    *_all(_RUNNER, "GPUModelRunner", "kv_caches kv_cache_config vllm_config device", "worker.prefill_runner"),
    *_all(_RUNNER, "GPUModelRunner", "model_memory_usage is_multimodal_pruning_enabled", "worker.prefill_runner"),
    *_all(_RUNNER, "GPUModelRunner", "requires_sequential_video_encoding model", "worker.prefill_runner"),
    *_all(_RUNNER, "GPUModelRunner", "requests input_batch num_prompt_logprobs", "worker.handover"),
    *_all(_RUNNER, "GPUModelRunner", "discard_request_mask _dummy_run", "worker.prefill_runner"),
    *_all(_RUNNER, "GPUModelRunner", "propose_draft_token_ids", "worker.prefill_runner"),
    *_all(_RUNNER, "AsyncGPUModelRunnerOutput", "async_copy_ready_event", "worker.lane_device"),
    *_all("vllm.v1.worker.gpu_input_batch", "InputBatch", "remove_request", "worker.handover"),
    *_all("vllm.v1.worker.gpu_input_batch", "InputBatch", "generators num_reqs", "worker.prefill_runner"),
    # LoRA's table of adapters, and their slots.
    *_all("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin", "lora_manager", "worker.lora_state"),
    *_all("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin", "lora_manager", "worker.prefill_runner"),
    *_all("vllm.lora.worker_manager", "WorkerLoRAManager", "_adapter_manager", "worker.lora_state"),
    *_all(_LORA, "LoRAModelManager", "punica_wrapper_mapping lora_index_to_id", "worker.lora_state"),
    *_all(_LORA, "LoRAModelManager", "_last_mapping _last_slot_layout", "worker.lora_state"),
    *_all("vllm.lora.layers.utils", "LoRAMapping", "prompt_mapping", "worker.lora_state"),
    # Model Runner V2, on GPUs.
    *_all(_RUNNER_V2, "GPUModelRunner", "execute_model sample_tokens", "worker.prefill_lane"),
    *_all(_RUNNER_V2, "GPUModelRunner", "load_model", "worker.prefill_runner"),
    *_all(_RUNNER_V2, "GPUModelRunner", "initialize_kv_cache kv_caches model", "worker.prefill_runner"),
    *_all(_RUNNER_V2, "", "init_kv_cache", "worker.prefill_runner"),
    *_all(_RUNNER_V2, "GPUModelRunner", "_remove_request req_states", "worker.handover"),
    *_all(_RUNNER_V2, "GPUModelRunner", "main_stream", "worker.lane_device"),
    *_all(_RUNNER_V2, "GPUModelRunner", "cudagraph_manager", "worker.decode_graphs"),
    *_all(_RUNNER_V2, "GPUModelRunner", "capture_model decode_query_len", "worker.decode_graphs"),
    *_all(_RUNNER_V2, "GPUModelRunner", "_dummy_run", "worker.prefill_runner"),
    *_all(_RUNNER_V2, "GPUModelRunner", "execute_model_state", "worker.prefill_lane"),
    *_all(_RUNNER, "GPUModelRunner", "execute_model_state", "worker.prefill_lane"),
    *_all("vllm.distributed.parallel_state", "", "GraphCaptureContext graph_capture", "worker.decode_graphs"),
    *_all("vllm.v1.worker.gpu.cudagraph_utils", "", "ModelCudaGraphManager", "worker.decode_graphs"),
    *_all("vllm.config.compilation", "CUDAGraphMode", "FULL_DECODE_ONLY", "worker.decode_graphs"),
    *_all("vllm.config.compilation", "CUDAGraphMode", "decode_mode FULL", "support"),
    *_all("vllm.config.compilation", "CompilationConfig", "cudagraph_capture_sizes", "worker.decode_graphs"),
    *_all("vllm.config.compilation", "CompilationConfig", "max_cudagraph_capture_size", "worker.decode_graphs"),
    *_all("vllm.config.compilation", "CompilationConfig", "cudagraph_mode", "support"),
    *_all("vllm.config.compilation", "CompilationConfig", "cudagraph_mode", "mixed_graphs"),
    *_all("vllm.config.compilation", "CompilationConfig", "max_cudagraph_capture_size", "mixed_graphs"),
    *_all("vllm.config.compilation", "CUDAGraphMode", "mixed_mode NONE", "mixed_graphs"),
    *_all("vllm.v1.worker.workspace", "", "use_workspace_lane", "worker.prefill_lane"),
    *_all("vllm.v1.worker.workspace", "", "unlock_workspace", "worker.decode_graphs"),
    *_all("vllm.v1.worker.workspace", "", "current_workspace_manager _manager", "worker.gpu"),
    *_all("vllm.v1.worker.workspace", "WorkspaceManager", "_alloc_context _current_workspaces", "worker.gpu"),
    *_all("vllm.v1.worker.workspace", "WorkspaceManager", "_workspace_size_bytes", "worker.gpu"),
    *_all("vllm.v1.worker.gpu.states", "RequestState", "req_id_to_index", "worker.handover"),
    *_all("vllm.v1.worker.gpu.async_utils", "AsyncOutput", "copy_event", "worker.lane_device"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "determine_available_memory", "worker.gpu"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "init_device load_model", "worker.worker"),
    *_all("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model", "worker.gpu"),
    *_all("vllm.v1.worker.cpu_worker", "CPUWorker", "init_device", "worker.worker"),
    *_all(_RUNNER_V2, "GPUModelRunner", "get_model", "worker.gpu"),
    *_all(_RUNNER, "GPUModelRunner", "get_model", "worker.gpu"),
    *_all(
        "vllm.model_executor.layers.fused_moe.runner.shared_experts", "SharedExperts", "_stream", "worker.side_streams"
    ),
    *_all("vllm.v1.outputs", "AsyncModelRunnerOutput", "get_output", "worker.worker"),
    *_all("vllm.v1.core.sched.output", "NewRequestData", "from_request", "residency"),
    *_all("vllm.v1.core.sched.output", "CachedRequestData", "req_ids num_computed_tokens", "residency"),
    *_all("vllm.v1.request", "Request", "_all_token_ids", "residency"),
    # Several ranks: the groups of a forward pass, and what is in each.
    *_all("vllm.distributed.parallel_state", "", "_WORLD _INNER_DP_WORLD", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "", "init_model_parallel_group", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "GroupCoordinator", "world_size unique_name", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "GroupCoordinator", "group_ranks local_rank", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "GroupCoordinator", "device_communicator", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "GroupCoordinator", "device_group cpu_group", "worker.communicators"),
    *_all("vllm.distributed.parallel_state", "GroupCoordinator", "mq_broadcaster destroy", "worker.communicators"),
    *_all(
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        "torch_distributed_backend use_device_communicator",
        "worker.communicators",
    ),
    # The forward pass.
    *_all("vllm.forward_context", "", "_forward_context", "worker.process_state"),
    *_all(
        "vllm.v1.sample.ops.topk_topp_triton",
        "",
        "_TRITON_BUFFER_CACHE _TRITON_SPLIT_CACHE",
        "worker.process_state",
    ),
    *_all(_RUNNER_V2, "GPUModelRunner", "attn_groups", "worker.gpu"),
    *_all(_RUNNER, "GPUModelRunner", "attn_groups", "worker.gpu"),
    *_all("vllm.v1.worker.utils", "AttentionGroup", "backend", "worker.gpu"),
    *_all("vllm.v1.attention.backend", "AttentionBackend", "get_name", "worker.gpu"),
    *_all("vllm.forward_context", "ForwardContext", "no_compile_layers", "worker.layer_view"),
    *_all("vllm.model_executor.layers.attention_layer_base", "", "AttentionLayerBase", "worker.prefill_runner"),
    *_all("vllm.config.vllm", "VllmConfig", "compilation_config", "worker.prefill_runner"),
    *_all("vllm.config.compilation", "CompilationConfig", "static_forward_context", "worker.prefill_runner"),
    *_all("vllm.config", "", "set_current_vllm_config", "worker.prefill_runner"),
)


def missing_from_installed() -> list[Internal]:
    """The internals that the installed vLLM lacks."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return list(INTERNALS)
    return missing(Path(next(iter(spec.submodule_search_locations))))


@lru_cache(maxsize=4)
def _missing(package: Path) -> tuple[Internal, ...]:
    return tuple(item for item in INTERNALS if item.name not in _names(package, item.module).get(item.owner, ()))


def missing(package: Path) -> list[Internal]:
    """The internals that the source folder `package` of a vLLM lacks."""
    return list(_missing(package))


@lru_cache(maxsize=256)
def _names(package: Path, module: str) -> dict[str, frozenset[str]]:
    """The names in a module: those of the module itself under "", those of each class under the class's name."""
    path = package.parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.is_file():
        return {}
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = {"": frozenset(_bound_names(tree.body))}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = frozenset(_bound_names(node.body)) | frozenset(_self_attributes(node))
    return found


def _bound_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _self_attributes(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
