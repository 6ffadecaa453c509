# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the two runners of vLLM and for a worker, which do with a scheduler's messages what those do.

One runner for V1 and one for Model Runner V2. A stand-in knows the tokens that it was told and those that it sampled,
and where V1 does it keeps a placeholder for a token that only the device knows until its next step. Its KV cache holds
the tokens, one copy for each layer, and the next token is a function of what it reads there through the block table: a
lost token, a wrong block, a block that was freed too early or one that was hit before it was computed changes the
answer, which is a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import tiny_model
import torch
from driver import ENGINE
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pdmux.worker.lane_device import HostDevice
from vllm_pdmux.worker.worker import PDMuxWorkerMixin

if TYPE_CHECKING:
    from async_engine import Arrival

BLOCK, BLOCKS, LAYERS, VOCAB = ENGINE["block_size"], 20, tiny_model.LAYERS, 251
LAYER_NAMES = [f"layer.{i}" for i in range(LAYERS)]
PLACEHOLDER = -1
PLACES = np.arange(1, ENGINE["max_model_len"] + 1)


# --- the stand-in model ---------------------------------------------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`. Every token counts, in its place."""
    return closing(LAYERS * weighted(tokens), len(tokens))


def weighted(tokens: Sequence[int]) -> int:
    return sum(token * place for place, token in enumerate(tokens, 1))


def closing(total: int, length: int) -> int:
    return (31 * total + 7 * length) % VOCAB


def answer(tokens: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """What an engine is to say to a prompt."""
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + max_tokens and tokens[start:][-1:] not in [[token] for token in stop]:
        tokens.append(next_token(tokens))
    return tokens[start:]


def session_answer(turns: Sequence[Arrival]) -> list[int]:
    """What an engine is to say in a session. A turn follows on all that was said but its last token."""
    context, said = [], []
    for turn in turns:
        context += turn.prompt
        said += answer(context, turn.max_tokens, turn.stop)
        context += answer(context, turn.max_tokens, turn.stop)[:-1]
    return said


@dataclass
class State:
    """What a runner remembers of a request."""

    prompt_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    wants_prompt_logprobs: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]


@dataclass
class Input:
    """A request's part of one forward pass."""

    first: int  # position of the first token that is computed
    tokens: list[int]
    slots: np.ndarray  # of all positions up to the last token
    is_sampled: bool  # False: a prompt's chunk that is not its last
    total: int = 0


class Later(AsyncModelRunnerOutput):
    """A step's output that the host does not have yet."""

    def __init__(self, output: ModelRunnerOutput):
        self._output = output
        self.looks = 0  # of a lane that asks whether it is there

    def get_output(self) -> ModelRunnerOutput:
        return self._output

    def get_kv_connector_output(self) -> None: ...


class StandInRunner:
    """The forward pass of the stand-in model; its subclasses follow the requests from step to step."""

    def __init__(self, vllm_config, device):
        self.vllm_config, self.device = vllm_config, device
        self.is_async = vllm_config.scheduler_config.async_scheduling
        self.is_read_later = self.is_async
        self.block_size = vllm_config.cache_config.block_size
        self.requests: dict[str, State] = {}
        self.execute_model_state: dict[str, Input] | None = None

    def execute_model(self, output):
        assert self.execute_model_state is None, "sample_tokens was not called"
        self.update_states(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        inputs = {i: self.input_of(i, n) for i, n in output.num_scheduled_tokens.items()}
        for layer, (cache, name) in enumerate(zip(self.kv_caches, LAYER_NAMES, strict=True)):
            self.vllm_config.compilation_config.static_forward_context[name]  # where the lane stops
            self.at_layer(layer, inputs)
            for part in inputs.values():
                cache[part.slots[part.first :]] = part.tokens
            for part in inputs.values():
                part.total += int(cache[part.slots] @ PLACES[: len(part.slots)])
        self.execute_model_state = inputs
        return None

    def at_layer(self, layer, inputs):
        """For tests that watch the KV cache."""

    def sample_tokens(self, grammar_output):
        inputs, self.execute_model_state = self.execute_model_state, None
        sampled = {i: closing(part.total, len(part.slots)) for i, part in inputs.items() if part.is_sampled}
        self.keep_sampled(sampled)
        output = ModelRunnerOutput(
            req_ids=list(inputs),
            req_id_to_index={req_id: i for i, req_id in enumerate(inputs)},
            sampled_token_ids=[[sampled[i]] if i in sampled else [] for i in inputs],
        )
        return Later(output) if self.is_read_later else output

    def slots_of(self, block_ids: list[int], end: int) -> np.ndarray:
        positions = np.arange(end)
        return np.array(block_ids)[positions // self.block_size] * self.block_size + positions % self.block_size

    def new_kv_caches(self, kv_cache_config):
        never_written = 10**6
        return np.full((LAYERS, kv_cache_config.num_blocks * self.block_size), never_written)


@dataclass
class Row:
    """A request in a V1 runner's batch: copies of its tokens and block ids, up to date only while it stays there."""

    tokens: list[int]
    block_ids: list[int]


class Batch:
    """The requests of a V1 runner's last step, and the tokens that it sampled for them."""

    def __init__(self):
        self.rows: dict[str, Row] = {}
        self.on_device: dict[str, int] = {}
        self.generators: dict[int, torch.Generator] = {}

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    def add_request(self, req_id: str, state: State) -> None:
        self.rows[req_id] = Row(state.tokens, state.block_ids.copy())

    def remove_request(self, req_id: str) -> None:
        self.rows.pop(req_id, None)
        self.on_device.pop(req_id, None)


class StandInRunnerV1(StandInRunner):
    """Speaks a V1 runner's protocol; see vllm.v1.worker.gpu_model_runner.

    It knows the tokens that it sampled, under asynchronous scheduling only as placeholders.
    """

    def __init__(self, vllm_config, device):
        super().__init__(vllm_config, device)
        self.num_prompt_logprobs: dict[str, int] = {}
        self.input_batch = Batch()
        self.discard_request_mask = SimpleNamespace(np=np.zeros(ENGINE["max_num_seqs"], dtype=bool))

    def initialize_kv_cache(self, kv_cache_config):
        self.kv_cache_config = kv_cache_config
        self.initialize_kv_cache_tensors(kv_cache_config)

    def initialize_kv_cache_tensors(self, kv_cache_config):
        self.kv_caches = self.new_kv_caches(kv_cache_config)

    def keep_sampled(self, sampled):
        for req_id, token in sampled.items():
            known = PLACEHOLDER if self.is_async else token
            self.requests[req_id].wants_prompt_logprobs = False
            self.num_prompt_logprobs.pop(req_id, None)
            self.requests[req_id].output_token_ids.append(known)
            self.input_batch.rows[req_id].tokens.append(known)
        self.input_batch.on_device = sampled if self.is_async else {}

    def input_of(self, req_id, count):
        state, row = self.requests[req_id], self.input_batch.rows[req_id]
        assert state.wants_prompt_logprobs == (req_id in self.num_prompt_logprobs)
        first, end = state.num_computed_tokens, state.num_computed_tokens + count
        tokens = row.tokens[first:end]
        assert len(tokens) == count, f"{req_id} is to compute tokens that its runner does not have"
        if tokens[-1] == PLACEHOLDER:
            tokens[-1] = self.input_batch.on_device[req_id]
        assert PLACEHOLDER not in tokens
        return Input(first, tokens, self.slots_of(row.block_ids, end), is_sampled=end >= len(state.tokens))

    def update_states(self, output):
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.num_prompt_logprobs.pop(req_id, None)
            self.input_batch.remove_request(req_id)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for req_id in self.input_batch.rows.keys() - (output.num_scheduled_tokens.keys() - resumed):
            self.input_batch.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            # Known already: the next turn of a streaming session.
            self.input_batch.remove_request(new.req_id)
            state = State(new.prompt_token_ids.copy(), list(new.block_ids[0]), new.num_computed_tokens)
            if new.sampling_params.prompt_logprobs is not None:
                state.wants_prompt_logprobs, self.num_prompt_logprobs[new.req_id] = True, 1
            self.requests[new.req_id] = state
            self.input_batch.add_request(new.req_id, state)
        for i, req_id in enumerate(output.scheduled_cached_reqs.req_ids):
            self._update_cached(req_id, i, output.scheduled_cached_reqs)
        assert self.input_batch.rows.keys() == output.num_scheduled_tokens.keys()

    def _update_cached(self, req_id, i, data):
        state, row, num_output = self.requests[req_id], self.input_batch.rows.get(req_id), data.num_output_tokens[i]
        new_block_ids = data.new_block_ids[i][0] if data.new_block_ids[i] else []
        state.num_computed_tokens = data.num_computed_tokens[i]
        del state.output_token_ids[num_output:]
        if req_id in data.resumed_req_ids:
            assert row is None
            state.block_ids = []
        state.block_ids.extend(new_block_ids)
        if row is not None:
            row.block_ids.extend(new_block_ids)
            return
        if self.is_async and num_output > 0:  # its placeholders are of a step that is not this runner's last
            state.output_token_ids = data.all_token_ids[req_id][-num_output:]
        self.input_batch.add_request(req_id, state)


class StandInRunnerV2(StandInRunner):
    """Speaks Model Runner V2's protocol; see vllm.v1.worker.gpu.model_runner.

    A request that it does not know comes with all its tokens; from then on it keeps what it samples. It forgets a
    request that is preempted.
    """

    def __init__(self, vllm_config, device):
        super().__init__(vllm_config, device)
        self.is_read_later = True  # under synchronous scheduling too
        self.req_states = SimpleNamespace(req_id_to_index=self.requests)
        self.model = SimpleNamespace(kv_caches=None)  # the layers, to which the KV cache is bound

    def load_model(self, model):
        self.model = model

    def initialize_kv_cache(self, kv_cache_config):
        self.kv_cache_config = kv_cache_config
        if self.model.kv_caches is None:
            self.model.kv_caches = self.new_kv_caches(kv_cache_config)

    @property
    def kv_caches(self):
        return self.model.kv_caches

    def _remove_request(self, req_id):
        self.requests.pop(req_id, None)

    def keep_sampled(self, sampled):
        for req_id, token in sampled.items():
            self.requests[req_id].output_token_ids.append(token)

    def input_of(self, req_id, count):
        state = self.requests[req_id]
        first, end = state.num_computed_tokens, state.num_computed_tokens + count
        tokens = state.tokens[first:end]
        assert len(tokens) == count, f"{req_id} is to compute tokens that its runner does not have"
        return Input(first, tokens, self.slots_of(state.block_ids, end), is_sampled=end >= len(state.tokens))

    def update_states(self, output):
        for req_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._remove_request(req_id)
        for new in output.scheduled_new_reqs:
            tokens, computed = list(new.prefill_token_ids), new.num_computed_tokens
            if new.sampling_params.prompt_logprobs is not None:
                assert not 0 < computed < len(new.prompt_token_ids), "a runner lacks the first chunk's prompt logprobs"
            self.requests[new.req_id] = State(tokens, list(new.block_ids[0]), computed)
        data = output.scheduled_cached_reqs
        for req_id, num_computed, block_ids in zip(
            data.req_ids, data.num_computed_tokens, data.new_block_ids, strict=True
        ):
            self.requests[req_id].num_computed_tokens = num_computed
            self.requests[req_id].block_ids.extend(block_ids[0] if block_ids else [])


class StandInLayer(AttentionLayerBase):
    """An attention layer by its class alone, which is what makes it a place to stop."""

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


class StandInWorker:
    """In the place of vLLM's CPU worker."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        vllm_config.compilation_config.static_forward_context = dict.fromkeys(LAYER_NAMES, StandInLayer())
        runner = StandInRunnerV2 if vllm_config.use_v2_model_runner else StandInRunnerV1
        self.model_runner = runner(vllm_config, torch.device("cpu"))

    def get_kv_cache_spec(self):
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        return dict.fromkeys(LAYER_NAMES, spec)

    def get_supported_kv_cache_layouts(self):
        return ["LBNHC"]

    def set_kv_cache_layout(self, layout_name):
        pass

    def determine_available_memory(self):
        return 1 << 30

    def initialize_from_config(self, kv_cache_configs):
        self.model_runner.initialize_kv_cache(kv_cache_configs[0])

    def compile_or_warm_up_model(self):
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, output):
        return self.model_runner.execute_model(output)

    def sample_tokens(self, grammar_output):
        return self.model_runner.sample_tokens(grammar_output)

    def shutdown(self):
        pass


class SlowDevice(HostDevice):
    """Like a GPU, it may be some steps later that a batch has ended."""

    delay = 0  # steps

    def is_done(self, output):
        output.looks += 1  # once a step
        return output.looks > self.delay


class StandInPDMuxWorker(PDMuxWorkerMixin, StandInWorker):
    """The real mixin over the stand-in."""

    def _lane_device(self):
        self.slow_device = SlowDevice()
        return self.slow_device


class StandInExecutor(UniProcExecutor):
    """One worker in this process. Its futures are done at once; the engine looks at them two steps later, in order."""

    worker_class = StandInWorker

    def _init_executor(self):
        self.driver_worker = self.worker_class(self.vllm_config)


class StandInPDMuxExecutor(StandInExecutor):
    worker_class = StandInPDMuxWorker
