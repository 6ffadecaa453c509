# SPDX-License-Identifier: Apache-2.0
"""The engines: stock vLLM and the plugin, equal in everything else, each alone in this process while it runs."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_pdmux.demo import DemoError

_TRACE_STEPS = 4096
# vLLM fits the context to the KV cache: a model made for long contexts need not have room for one.
_AUTO_FIT = -1

# Read when vLLM and torch are imported. A user's own values are kept.
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}
_KV_CACHE_ON_A_CPU = "VLLM_CPU_KVCACHE_SPACE"  # GiB


@dataclass(frozen=True)
class EngineOptions:
    """What all engines are built with, and the plugin's settings."""

    model: str  # folder
    max_model_len: int | None = None
    dtype: str | None = None  # None: float32 on a CPU, see `_arguments`
    compile: bool = False
    layers_per_group: int | None = None  # None: the plugin's default
    most_requests: int = 128  # that run at once

    def pdmux(self, enabled: bool) -> dict[str, Any]:
        """The value of ``additional_config["pdmux"]``. Stock is said too, since PDMUX=1 would ask for the plugin."""
        if not enabled:
            return {"enabled": False}
        settings: dict[str, Any] = {"enabled": True, "trace_steps": _TRACE_STEPS}
        return settings if self.layers_per_group is None else settings | {"layers_per_group": self.layers_per_group}


def prepare_environment() -> None:
    """Set what vLLM reads from the environment; must come before its import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler's trace is read in this process
    os.environ.setdefault(_KV_CACHE_ON_A_CPU, "1")
    quieten()


def quieten() -> None:
    """Keep vLLM and torch from printing what is no error; must come before their import."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").addHandler(logging.NullHandler())  # what vLLM says before it sets its logger up
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")  # deprecations inside vLLM and torch


@contextmanager
def running_engine(options: EngineOptions, with_pdmux: bool, chunk_tokens: int | None = None) -> Iterator[Any]:
    """A ``vllm.LLM``, shut down and freed at the end. DemoError when vLLM or the plugin refuses the options.

    `chunk_tokens`: of a step at most, decoding requests included; None: vLLM's default."""
    arguments = _arguments(options) | {"additional_config": {"pdmux": options.pdmux(with_pdmux)}}
    if chunk_tokens is not None:
        arguments["max_num_batched_tokens"] = chunk_tokens
    with running(arguments, with_pdmux) as llm:
        yield llm


@contextmanager
def running(arguments: dict[str, Any], with_pdmux: bool) -> Iterator[Any]:
    """The same with these arguments of ``vllm.LLM``, which say by ``additional_config`` whether the plugin serves."""
    llm = _build(arguments, with_pdmux)
    try:
        if (trace_of(llm) is not None) != with_pdmux:
            raise DemoError(_wrong_scheduler(with_pdmux))
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def trace_of(llm: Any) -> Any:
    """The scheduler's `StepTrace`; None in a stock engine."""
    return getattr(llm.llm_engine.engine_core.engine_core.scheduler, "pdmux_trace", None)


def layers_of(llm: Any) -> int:
    """Layers of the model."""
    config = llm.llm_engine.vllm_config
    layers: int = config.model_config.get_num_layers(config.parallel_config)
    return layers


def _build(arguments: dict[str, Any], with_pdmux: bool) -> Any:
    from vllm import LLM

    try:
        return LLM(**arguments)
    except (ValueError, OSError) as error:
        which = "with the plugin" if with_pdmux else "stock"
        raise DemoError(f"vLLM ({which}) does not start with {arguments['model']}: {reason_of(error)}") from error


def _arguments(options: EngineOptions) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``.

    float32 on a CPU: a batch of other sizes rounds otherwise, and in bfloat16 that is enough to choose another token.
    """
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments = {
        "model": options.model,
        "dtype": options.dtype or ("float32" if on_cpu else "auto"),
        "max_model_len": options.max_model_len or _AUTO_FIT,
        "max_num_seqs": options.most_requests,  # vLLM's default may be more than a chunk has tokens
        "enforce_eager": not options.compile,
        "enable_prefix_caching": False,  # no engine must be helped by anything
        "use_tqdm_on_load": False,
    }
    return arguments | {"distributed_executor_backend": "uni"} if on_cpu else arguments


def _wrong_scheduler(with_pdmux: bool) -> str:
    if with_pdmux:
        return (
            f"vLLM did not load the plugin (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r}): "
            "add pdmux to VLLM_PLUGINS or unset it, or reinstall vllm-pdmux"
        )
    return "the stock engine has the plugin's scheduler: report this as a bug"


def reason_of(error: Exception) -> str:
    """What was wrong, without the frame that pydantic puts around it."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(str(item.get("ctx", {}).get("error") or item["msg"]) for item in details())
    return str(error)
