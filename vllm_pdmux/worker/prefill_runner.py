# SPDX-License-Identifier: Apache-2.0
"""The prefill lane's runner: a second runner of the platform's class over the same weights and the same KV cache.

It owns everything a runner writes to (input buffers, block tables, request states, sampler, attention metadata
builders), so the lanes share no scratch. It is built after the first runner has bound the KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config

from vllm_pdmux.worker.lane import Lane
from vllm_pdmux.worker.layer_view import LayerView

# What `load_model` puts on a V1 runner besides the model itself; a runner that is given its model lacks them.
_SET_BY_LOADING = ("model", "model_memory_usage", "is_multimodal_pruning_enabled", "requires_sequential_video_encoding")


def prefill_config(vllm_config: VllmConfig, view: LayerView) -> VllmConfig:
    """The engine's config with `view` in the place of its layers; all else is shared."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = view
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


def build_prefill_runner(decode_runner: Any, lane: Lane) -> tuple[Any, LayerView]:
    """A second runner beside `decode_runner`, which has its model and its KV cache, and the view that suspends it."""
    vllm_config = decode_runner.vllm_config
    view = LayerView(vllm_config.compilation_config.static_forward_context, lane.at_layer)
    config = prefill_config(vllm_config, view)

    class PrefillRunner(type(decode_runner)):  # type: ignore[misc]
        """The platform's runner with the KV cache of the decode lane."""

        def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            # The layers are bound to the decode lane's tensors already; allocating would bind them to new ones.
            self.kv_caches = decode_runner.kv_caches
            return {}

        def sample_tokens(self, grammar_output: Any) -> Any:
            with generators_set_aside(self):
                return super().sample_tokens(grammar_output)

    with set_current_vllm_config(config):
        runner = PrefillRunner(config, decode_runner.device)
        for name in _SET_BY_LOADING:
            if hasattr(decode_runner, name):
                setattr(runner, name, getattr(decode_runner, name))
        runner.initialize_kv_cache(decode_runner.kv_cache_config)
    return runner, view
