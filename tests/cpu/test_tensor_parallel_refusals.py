# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism is refused until it is asked for by name, and then whatever is not proven beside it."""

from types import SimpleNamespace

import pytest
from process_helpers import WORKER, resolve
from test_bad_input import ASKED, message_of, refusal_of
from vllm import envs, platforms
from vllm.config import CompilationMode

from vllm_pdmux import tensor_parallel
from vllm_pdmux.tensor_parallel import REFUSALS, problems

RANKS = 3  # the model has nine heads
REAL = ASKED | {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp", "enforce_eager": True}
ALLOWED = {"additional_config": {"pdmux": {"experimental_tensor_parallel": True}}}
ENVIRONMENT = {
    "FlashInfer's all-reduce": "VLLM_ALLREDUCE_USE_FLASHINFER",
    "FlashInfer's PCIe all-reduce": "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
    "NCCL's symmetric memory": "VLLM_USE_NCCL_SYMM_MEM",
}
USED = {  # feature: the setting that uses it, its value, how the message shows it
    "expert parallelism": ("parallel_config.enable_expert_parallel", True, "--enable-expert-parallel"),
    "models with experts": ("model_config.is_moe", True, "model some/model"),
    "more than one machine": ("parallel_config.nnodes", 2, "--nnodes 2"),
    "an executor other than mp": ("parallel_config.distributed_executor_backend", "ray", "ray"),
    "batch-sharded sampling": (
        "parallel_config.enable_batch_sharded_sampling",
        True,
        "--enable-batch-sharded-sampling",
    ),
    "sequence parallelism of mHC layers": ("parallel_config.enable_hc_sp", True, "--enable-hc-sp"),
    "all-reduces fused with norms": (
        "compilation_config.pass_config.fuse_allreduce_rms",
        True,
        "fuse_allreduce_rms",
    ),
    "data parallelism": ("parallel_config.data_parallel_size", 2, "--data-parallel-size 2"),
    "LoRA": ("lora_config", SimpleNamespace(), "--enable-lora"),
    "speculative decoding": ("speculative_config", SimpleNamespace(method="ngram"), "ngram"),
    "prompt embeddings": ("model_config.enable_prompt_embeds", True, "--enable-prompt-embeds"),
}


def settings(allowed=True, sharing="capped", watchdog_action="log"):
    return SimpleNamespace(experimental_tensor_parallel=allowed, sharing=sharing, watchdog_action=watchdog_action)


def engine(size=2, mode=CompilationMode.NONE):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=size,
            enable_expert_parallel=False,
            nnodes=1,
            data_parallel_size=1,
            distributed_executor_backend="mp",
            enable_batch_sharded_sampling=False,
            enable_hc_sp=False,
        ),
        model_config=SimpleNamespace(model="some/model", is_moe=False, enable_prompt_embeds=False),
        lora_config=None,
        speculative_config=None,
        compilation_config=SimpleNamespace(mode=mode, pass_config=SimpleNamespace(fuse_allreduce_rms=False)),
    )


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    for name in ENVIRONMENT.values():
        monkeypatch.setitem(envs.environment_variables, name, lambda: False)


def remedy(feature):
    return next(refusal.remedy for refusal in REFUSALS if refusal.feature == feature)


def text(feature, value):
    return f"with tensor parallelism {feature} ({value}) is not supported: {remedy(feature)}"


def test_without_the_setting_it_is_refused_with_a_way_to_try_it():
    assert problems(engine(4), settings(allowed=False)) == [
        "tensor parallelism (tensor_parallel_size=4) is not supported: set --tensor-parallel-size 1, or the setting "
        "experimental_tensor_parallel to true to try it: it has been tested on CPUs with two processes and has not "
        "been run on several GPUs"
    ]


@pytest.mark.parametrize("allowed", [False, True])
def test_one_rank_is_no_business_of_this(allowed):
    assert problems(engine(1, CompilationMode.VLLM_COMPILE), settings(allowed)) == []


def test_with_it_what_uses_nothing_else_is_served():
    assert problems(engine(), settings()) == []


@pytest.mark.usefixtures("on_cuda")
def test_on_a_gpu_compiled_too():
    assert problems(engine(mode=CompilationMode.VLLM_COMPILE), settings()) == []


def test_every_refusal_has_a_case_here():
    assert {refusal.feature for refusal in REFUSALS} == {*USED, *ENVIRONMENT, "torch.compile on a CPU"}


@pytest.mark.parametrize("feature", USED)
def test_a_feature_beside_it_is_refused(feature):
    path, value, shown = USED[feature]
    config = engine()
    *owners, name = path.split(".")
    owner = config
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, value)
    assert problems(config, settings()) == [text(feature, shown)]


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("feature", ENVIRONMENT)
def test_a_communicator_with_one_buffer_for_the_process_is_refused_on_a_gpu(feature, monkeypatch):
    name = ENVIRONMENT[feature]
    monkeypatch.setitem(envs.environment_variables, name, lambda: True)
    assert problems(engine(), settings()) == [text(feature, f"{name}=1")]


@pytest.mark.parametrize("mode", [CompilationMode.DYNAMO_TRACE_ONCE, CompilationMode.VLLM_COMPILE])
def test_compiled_on_a_cpu_it_is_refused(mode):
    assert problems(engine(mode=mode), settings()) == [text("torch.compile on a CPU", f"mode {mode.name}")]


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("sharing", ["disjoint", ("capped", "disjoint")])
def test_disjoint_is_refused_on_a_gpu(sharing):
    assert problems(engine(), settings(sharing=sharing)) == [
        "with tensor parallelism sharing disjoint is not supported: set sharing capped"
    ]


def test_a_real_start_without_the_setting_is_refused():
    assert message_of(resolve(REAL)) == refusal_of(
        f"tensor parallelism (tensor_parallel_size={RANKS}) is not supported: set --tensor-parallel-size 1, or the "
        f"setting {tensor_parallel.SETTING} to true to try it: {tensor_parallel.UNPROVEN}"
    )


def test_a_real_start_with_it_and_compilation_on_a_cpu_is_refused():
    compiled = REAL | ALLOWED | {"enforce_eager": False}
    assert message_of(resolve(compiled)) == refusal_of(text("torch.compile on a CPU", "mode DYNAMO_TRACE_ONCE"))


def test_a_real_start_with_it_warns():
    resolved = resolve(REAL | ALLOWED)
    assert resolved.error == "" and resolved.worker == WORKER
    assert [line for line in resolved.log_lines("tensor parallelism is experimental") if "WARNING" in line]


def test_ranks_do_not_give_up_each_by_its_own_clock():
    assert problems(engine(), settings(watchdog_action="fail")) == [
        "with tensor parallelism watchdog_action fail is not supported: set watchdog_action exit"
    ]
