# SPDX-License-Identifier: Apache-2.0
"""The prefill lane's runner: a second runner of the platform's class over the same weights and the same KV cache.

It owns everything a runner writes to (input buffers, block tables, request states, sampler, attention metadata
builders), so the lanes share no scratch. It is built after the first runner has bound the KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_pdmux.worker.layer_view import LayerView

# What `load_model` puts on a V1 runner besides the model itself; a runner that is given its model lacks them.
_SET_BY_LOADING = (
    "model",
    "lora_manager",
    "model_memory_usage",
    "is_multimodal_pruning_enabled",
    "requires_sequential_video_encoding",
)


def prefill_config(vllm_config: VllmConfig, view: LayerView) -> VllmConfig:
    """The engine's config with `view` in the place of its layers; all else is shared."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = view
    # No graph was captured on this lane's streams, and one captured elsewhere would run on other SMs.
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


@contextmanager
def generators_set_aside(runner: Any) -> Iterator[None]:
    """Let the rows of unfinished prompts be sampled without their seeded generators.

    A V1 runner samples them too, drops the tokens and winds the generators back, which a CPU generator cannot do: stock
    vLLM's engine dies of it. Chunked prompts are common in the lane, so the generators are not touched at all.
    """
    generators = runner.input_batch.generators
    unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    aside = {row: generators.pop(row) for row in map(int, unfinished) if row in generators}
    try:
        yield
    finally:
        generators.update(aside)


def build_prefill_runner(decode_runner: Any, at_layer: Callable[[], None]) -> tuple[Any, LayerView]:
    """A second runner beside `decode_runner`, which has its model and its KV cache, and the view that suspends it."""
    vllm_config = decode_runner.vllm_config
    layers = vllm_config.compilation_config.static_forward_context
    # Other layers, those of experts for one, look themselves up there too.
    boundaries = {name for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}
    view = LayerView(layers, boundaries, at_layer)
    config = prefill_config(vllm_config, view)
    build = _build_v2 if vllm_config.use_v2_model_runner else _build_v1
    with set_current_vllm_config(config):
        return build(decode_runner, config), view


def dummy_prefill(runner: Any, tokens: int, with_attention: bool) -> None:
    """One forward pass of `runner` over made-up tokens. Without attention it needs no KV cache."""
    if runner.vllm_config.use_v2_model_runner:
        runner._dummy_run(tokens, skip_attn=not with_attention, is_profile=not with_attention)
    else:
        runner._dummy_run(tokens, CUDAGraphMode.NONE, force_attention=with_attention, is_profile=not with_attention)


def _build_v1(decode_runner: Any, config: VllmConfig) -> Any:
    stock: Any = type(decode_runner)

    class PrefillRunner(stock):
        """The platform's runner with the KV cache of the decode lane."""

        def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            # The layers are bound to the decode lane's tensors already; allocating would bind them to new ones.
            self.kv_caches = decode_runner.kv_caches
            return {}

        def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
            return []  # nobody would take them: a request has drafts where it decodes

        def sample_tokens(self, grammar_output: Any) -> Any:
            with generators_set_aside(self):
                return super().sample_tokens(grammar_output)

    runner = PrefillRunner(config, decode_runner.device)
    for name in _SET_BY_LOADING:
        if hasattr(decode_runner, name):
            setattr(runner, name, getattr(decode_runner, name))
    runner.initialize_kv_cache(decode_runner.kv_cache_config)
    return runner


def _build_v2(decode_runner: Any, config: VllmConfig) -> Any:
    runner = type(decode_runner)(config, decode_runner.device)
    runner.load_model(model=decode_runner.model)
    with _bound_kv_cache(decode_runner):
        runner.initialize_kv_cache(decode_runner.kv_cache_config)
    return runner


@contextmanager
def _bound_kv_cache(decode_runner: Any) -> Iterator[None]:
    """Let a V2 runner that is initialised meanwhile take the KV cache that the layers are bound to.

    What: replaces the function that allocates and binds, in the runner's module, while one runner is initialised.
    Why: `initialize_kv_cache` calls it by that name and offers no other way to hand over a cache.
    To be deleted when a runner can be given its KV cache as it can be given its model.
    """
    from vllm.v1.worker.gpu import model_runner

    stock = model_runner.init_kv_cache
    model_runner.init_kv_cache = lambda *args, **kwargs: dict(enumerate(decode_runner.kv_caches))
    try:
        yield
    finally:
        model_runner.init_kv_cache = stock
