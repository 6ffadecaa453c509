# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: served when it is asked for by name, and what is refused beside it.

It has been tested on CPUs alone. What of vLLM keeps communication buffers for the whole process is refused, since both
lanes would write to them; so is what lets ranks choose for themselves, since they would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_pdmux.spatial import DISJOINT
from vllm_pdmux.support import Refusal, refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pdmux.config import PDMuxConfig

SETTING = "experimental_tensor_parallel"
UNPROVEN = "it has been tested on CPUs with two processes and has not been run on several GPUs"


def _parallel(name: str, flag: str) -> Callable[[VllmConfig], object]:
    return lambda config: getattr(config.parallel_config, name) and flag


def _more_than_one(name: str, flag: str) -> Callable[[VllmConfig], object]:
    return lambda config: (size := getattr(config.parallel_config, name)) > 1 and f"{flag} {size}"


def _environment(name: str) -> Callable[[VllmConfig], object]:
    def is_on(config: VllmConfig) -> object:
        from vllm.envs import environment_variables

        return _is_cuda() and environment_variables[name]() and f"{name}=1"

    return is_on


def _is_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _compiled_on_a_cpu(config: VllmConfig) -> object:
    from vllm.config import CompilationMode

    mode = config.compilation_config.mode
    return not _is_cuda() and mode not in (None, CompilationMode.NONE) and f"mode {CompilationMode(mode).name}"


REFUSALS = (
    Refusal("expert parallelism", _parallel("enable_expert_parallel", "--enable-expert-parallel"), "drop it"),
    Refusal(
        "models with experts",
        lambda c: c.model_config.is_moe and f"model {c.model_config.model}",
        "set --tensor-parallel-size 1",
    ),
    Refusal("more than one machine", _more_than_one("nnodes", "--nnodes"), "set --nnodes 1"),
    Refusal(
        "an executor other than mp",
        lambda c: (name := c.parallel_config.distributed_executor_backend) != "mp" and str(name),
        "set --distributed-executor-backend mp",
    ),
    Refusal(
        "batch-sharded sampling",
        _parallel("enable_batch_sharded_sampling", "--enable-batch-sharded-sampling"),
        "drop it",
    ),
    Refusal("sequence parallelism of mHC layers", _parallel("enable_hc_sp", "--enable-hc-sp"), "drop it"),
    Refusal(
        "all-reduces fused with norms",
        lambda c: c.compilation_config.pass_config.fuse_allreduce_rms and "fuse_allreduce_rms",
        "set -cc.pass_config.fuse_allreduce_rms=false",
    ),
    Refusal(
        "FlashInfer's all-reduce", _environment("VLLM_ALLREDUCE_USE_FLASHINFER"), "set VLLM_ALLREDUCE_USE_FLASHINFER=0"
    ),
    Refusal(
        "FlashInfer's PCIe all-reduce",
        _environment("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"),
        "set VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=0",
    ),
    Refusal("NCCL's symmetric memory", _environment("VLLM_USE_NCCL_SYMM_MEM"), "set VLLM_USE_NCCL_SYMM_MEM=0"),
    # Each is served with one rank, and was not tried with several.
    Refusal(
        "data parallelism",
        _more_than_one("data_parallel_size", "--data-parallel-size"),
        "set --data-parallel-size 1",
    ),
    Refusal("LoRA", lambda c: c.lora_config and "--enable-lora", "drop --enable-lora"),
    Refusal(
        "speculative decoding",
        lambda c: c.speculative_config and c.speculative_config.method,
        "drop --speculative-config",
    ),
    Refusal(
        "prompt embeddings",
        lambda c: c.model_config.enable_prompt_embeds and "--enable-prompt-embeds",
        "drop --enable-prompt-embeds",
    ),
    # There the communicator itself is written in the compiled code, not its name.
    Refusal("torch.compile on a CPU", _compiled_on_a_cpu, "set --enforce-eager"),
)


def is_used(vllm_config: VllmConfig) -> bool:
    """Whether the layers of the model are spread over several ranks."""
    return bool(vllm_config.parallel_config.tensor_parallel_size > 1)


def problems(vllm_config: VllmConfig, settings: PDMuxConfig) -> list[str]:
    """What keeps an engine with several ranks from being served; empty where there is one rank."""
    if not is_used(vllm_config):
        return []
    size = vllm_config.parallel_config.tensor_parallel_size
    if not settings.experimental_tensor_parallel:
        return [
            f"tensor parallelism (tensor_parallel_size={size}) is not supported: set --tensor-parallel-size 1, or the "
            f"setting {SETTING} to true to try it: {UNPROVEN}"
        ]
    found = [f"with tensor parallelism {problem}" for problem in refused(REFUSALS, vllm_config)]
    if _is_cuda() and DISJOINT in settings.sharing:  # each rank would capture the graphs that it has memory for
        found.append("with tensor parallelism sharing disjoint is not supported: set sharing capped")
    if settings.watchdog_action == "fail":  # each rank would give up by its own clock
        found.append("with tensor parallelism watchdog_action fail is not supported: set watchdog_action exit")
    return found
