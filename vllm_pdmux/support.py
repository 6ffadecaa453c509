# SPDX-License-Identifier: Apache-2.0
"""What is refused at start, and why. An entry leaves the table when a test shows that it works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pdmux.spatial import DISJOINT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pdmux.config import PDMuxConfig

MIN_VERSION, END_VERSION = (0, 32), (0, 34)  # supported: MIN <= vLLM < END
ALLOW_UNTESTED = "PDMUX_ALLOW_UNTESTED"


class UnsupportedError(ValueError):
    """Everything that keeps an engine from using the plugin, in one message."""

    def __init__(self, found: list[str]):
        self.problems = found
        super().__init__("pdmux cannot serve this configuration: " + "; ".join(found))


@dataclass(frozen=True)
class Refusal:
    """A feature that is not supported: how to see that a config uses it, and the way out."""

    feature: str
    used: Callable[[VllmConfig], object]  # the offending value, or something false
    remedy: str


def _more_than_one(name: str) -> Callable[[VllmConfig], object]:
    return lambda config: (size := getattr(config.parallel_config, name)) > 1 and f"{name}={size}"


def _model_flag(name: str) -> Callable[[VllmConfig], object]:
    return lambda config: getattr(config.model_config, name) and f"model {config.model_config.model}"


def _on_gpu(config: VllmConfig) -> bool:
    """What is proven on the CPU build alone is refused elsewhere."""
    on_gpu: bool = config.device_config.device_type == "cuda"
    return on_gpu


def _speculation(config: VllmConfig) -> str | None:
    speculative = config.speculative_config
    if speculative is None:
        return None
    if speculative.method == "ngram" and not _on_gpu(config) and not config.lora_config:
        return None
    method: str = speculative.method
    return method


def _data_parallelism(config: VllmConfig) -> str | None:
    """Engines of a dense model are independent of each other; those of a model with experts step together."""
    parallel = config.parallel_config
    if parallel.data_parallel_size <= 1:
        return None
    if _on_gpu(config) or config.model_config.is_moe:
        return f"data_parallel_size={parallel.data_parallel_size}"
    if parallel.data_parallel_backend != "mp":
        return f"data_parallel_backend={parallel.data_parallel_backend}"
    return None


def _has_kv_events(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


REFUSALS = (
    Refusal("pipeline parallelism", _more_than_one("pipeline_parallel_size"), "set --pipeline-parallel-size 1"),
    Refusal(
        "data parallelism",
        _data_parallelism,
        "set --data-parallel-size 1 and start several servers; on a CPU models without experts are served with "
        "--data-parallel-backend mp",
    ),
    Refusal(
        "decode context parallelism",
        _more_than_one("decode_context_parallel_size"),
        "set --decode-context-parallel-size 1",
    ),
    Refusal(
        "prefill context parallelism",
        _more_than_one("prefill_context_parallel_size"),
        "set --prefill-context-parallel-size 1",
    ),
    Refusal("dual batch overlap", lambda c: c.parallel_config.use_ubatching and "--enable-dbo", "drop --enable-dbo"),
    Refusal(
        "a KV connector",
        lambda c: c.kv_transfer_config and c.kv_transfer_config.kv_connector,
        "drop --kv-transfer-config: KV transfer is off on the prefill lane",
    ),
    Refusal("an encoder-cache connector", lambda c: c.ec_transfer_config and "ec_transfer_config", "drop it"),
    Refusal(
        "speculative decoding",
        _speculation,
        "drop --speculative-config; on a CPU the method ngram is served, without LoRA",
    ),
    Refusal("LoRA on a GPU", lambda c: _on_gpu(c) and c.lora_config and "--enable-lora", "drop --enable-lora"),
    Refusal("encoder-decoder models", _model_flag("is_encoder_decoder"), "use a decoder-only model"),
    Refusal(
        "pooling models",
        lambda c: c.model_config.runner_type != "generate" and f"--runner {c.model_config.runner_type}",
        "use a generative model",
    ),
    Refusal("diffusion models", _model_flag("is_diffusion"), "use an autoregressive model"),
    Refusal(
        "multimodal inputs",
        _model_flag("supports_multimodal_inputs"),
        "serve it for text alone with --language-model-only",
    ),
    Refusal(
        "prompt embeddings on a GPU",
        lambda c: _on_gpu(c) and c.model_config.enable_prompt_embeds and f"model {c.model_config.model}",
        "drop --enable-prompt-embeds",
    ),
    Refusal("models with Mamba or linear-attention layers", _model_flag("is_hybrid"), "use an attention-only model"),
    Refusal(
        "KV events of models with sliding windows",
        lambda c: _has_kv_events(c) and c.model_config.get_sliding_window() and f"model {c.model_config.model}",
        "drop --kv-events-config",
    ),
    Refusal("attention-free models", _model_flag("is_attention_free"), "use an attention model"),
    Refusal(
        "fast prefill with KV sharing",
        lambda c: c.cache_config.kv_sharing_fast_prefill and "--kv-sharing-fast-prefill",
        "drop --kv-sharing-fast-prefill",
    ),
    Refusal(
        "prompts that may not be split",
        lambda c: not c.scheduler_config.enable_chunked_prefill and "--no-enable-chunked-prefill",
        "drop it: a prompt longer than a batch would wait for ever",
    ),
    Refusal("auxiliary outputs", lambda c: c.aux_output_config.enabled and "aux_output_config", "disable them"),
)


def problems(vllm_config: VllmConfig, distribution: tuple[str, str], environ: Mapping[str, str]) -> list[str]:
    """Everything that is refused in `vllm_config`: what, the value, and the way out. Empty when it can be served.

    `distribution`: name and version of the installed vLLM.
    """
    return refused(REFUSALS, vllm_config) + _platform_problems() + version_problems(distribution, environ)


def refused(refusals: Iterable[Refusal], vllm_config: VllmConfig) -> list[str]:
    """Which of `refusals` `vllm_config` meets: what, the value, and the way out."""
    found = []
    for refusal in refusals:
        try:
            value = refusal.used(vllm_config)
        except AttributeError:
            continue  # a vLLM without this setting: `internals` lists it, so it is among the version problems
        if value:
            found.append(f"{refusal.feature} ({value}) is not supported: {refusal.remedy}")
    return found


def settings_problems(vllm_config: VllmConfig, settings: PDMuxConfig) -> list[str]:
    """Settings of the plugin that this platform or this engine cannot have."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    from vllm_pdmux import tensor_parallel

    found = calibration_problems(settings) + tensor_parallel.problems(vllm_config, settings)
    if not current_platform.is_cuda():
        if settings.backend not in ("auto", "serial"):
            found.append(f"backend {settings.backend} needs an NVIDIA GPU: set backend auto")
        if settings.watchdog_action == "fail":
            found.append(
                "watchdog_action is fail but on a CPU the engine itself hangs where a layer does: set watchdog_action "
                "exit"
            )
        return found
    if settings.backend == "serial":
        found.append("backend serial is for machines without a GPU: set backend auto, or lane serial for one lane")
    if DISJOINT not in settings.sharing:  # a word, or one for each division
        return found
    if settings.backend == "streams":
        found.append("backend streams makes no partition that decode could be confined to: set sharing capped")
    if not vllm_config.use_v2_model_runner:
        found.append("sharing disjoint needs Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER, or set sharing capped")
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        found.append(
            f"sharing disjoint confines decode by FULL CUDA graphs, but cudagraph_mode is {mode and mode.name}: "
            "drop --enforce-eager or set a cudagraph_mode with FULL decode graphs, or set sharing capped"
        )
    return found


def calibration_problems(settings: PDMuxConfig) -> list[str]:
    """What is wrong with the file that the setting `calibration` names, as far as it can be known before the start."""
    from vllm_pdmux.calibration.chosen import AUTO, OFF, named_profile
    from vllm_pdmux.config_errors import ConfigError

    if settings.calibration in (AUTO, OFF):
        return []
    try:
        named_profile(settings)
    except ConfigError as error:
        return [str(error)]
    return []


def version_problems(distribution: tuple[str, str], environ: Mapping[str, str]) -> list[str]:
    """vLLM outside the tested range, or without an internal that we use."""
    from vllm_pdmux import internals

    name, version = distribution
    found = []
    if environ.get(ALLOW_UNTESTED) != "1" and not MIN_VERSION <= _release(version) < END_VERSION:
        supported = f">={'.'.join(map(str, MIN_VERSION))},<{'.'.join(map(str, END_VERSION))}"
        found.append(
            f"{name} {version} is outside the tested range {supported}: install a version inside it, "
            f"or set {ALLOW_UNTESTED}=1 to try"
        )
    missing = internals.missing_from_installed()
    found += [f"{name} {version} has no {item.describe()}: install a supported version" for item in missing]
    return found


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split(".")[:2]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _platform_problems() -> list[str]:
    from vllm.platforms import current_platform

    platform = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if not platform.startswith("vllm.platforms."):
        return [
            f"the platform plugin {platform} is active: pdmux serves vLLM's own platforms; "
            "uninstall the other plugin or leave it out of VLLM_PLUGINS"
        ]
    if current_platform.is_cpu():
        return []
    if not current_platform.is_cuda():
        return [f"the platform {platform} is not supported: pdmux serves the CPU and NVIDIA builds of vLLM"]
    if not current_platform.has_device_capability(80):
        return ["the GPU is older than compute capability 8.0, which SM partitions need: use a newer GPU"]
    return []
