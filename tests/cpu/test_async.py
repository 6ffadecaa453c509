# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: the next step is scheduled before the tokens of this one are known.

The CPU build of vLLM forces it off, so the engine's real loop (`EngineCore.step_with_batch_queue`), scheduler, worker
mixin, lane and hand-over run here over stand-ins for the two runners. A stand-in does what a V1 runner does with a
scheduler's messages under asynchronous scheduling: it keeps a placeholder for a token that only the "device" knows yet,
and it finds that token in its own last step. Its KV cache holds the tokens, one copy for each layer, and the next token
is a function of what it reads there through the block table: a lost token, a wrong block, a block that was freed too
early or one that was hit before it was computed changes the answer, which is a closed form.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_model
import torch
from driver import ENGINE, LANE_THREAD, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pdmux.messages import attach_report, report_of
from vllm_pdmux.policy import LayerRule, TablePolicy
from vllm_pdmux.scheduler import PDMuxAsyncScheduler
from vllm_pdmux.worker.worker import PDMuxWorkerMixin

EXAMPLES = int(os.environ.get("PDMUX_EXAMPLES", "60"))
BLOCK, BLOCKS, LAYERS, VOCAB = ENGINE["block_size"], 20, tiny_model.LAYERS, 251
LAYER_NAMES = [f"layer.{i}" for i in range(LAYERS)]
PLACEHOLDER = -1


# --- the stand-in model ---------------------------------------------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`. Every token counts, in its place."""
    return closing(LAYERS * weighted(tokens, 0), len(tokens))


def weighted(tokens: Sequence[int], first_position: int) -> int:
    return sum(token * (position + 1) for position, token in enumerate(tokens, first_position))


def closing(total: int, length: int) -> int:
    return (31 * total + 7 * length) % VOCAB


def answer(tokens: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """The closed form of an answer."""
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + max_tokens and tokens[start:][-1:] not in [[token] for token in stop]:
        tokens.append(next_token(tokens))
    return tokens[start:]


@dataclass
class State:
    """What a V1 runner remembers of a request."""

    prompt_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]


class Batch:
    """The requests of a runner's last step, and the tokens that it sampled for them."""

    def __init__(self):
        self.req_ids: list[str] = []
        self.on_device: dict[str, int] = {}
        self.generators: dict[int, torch.Generator] = {}

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    def remove_request(self, req_id: str) -> None:
        if req_id in self.req_ids:
            self.req_ids.remove(req_id)
            self.on_device.pop(req_id, None)


@dataclass
class Row:
    """A request's part of one forward pass."""

    first: int  # position of the first token that is computed
    tokens: list[int]
    slots: np.ndarray  # of all positions up to the last token
    is_sampled: bool  # False: a prompt's chunk that is not its last
    total: int = 0


class StandInRunner:
    """Speaks a V1 runner's protocol under asynchronous scheduling; see GPUModelRunner._update_states."""

    def __init__(self, vllm_config, device):
        self.vllm_config, self.device = vllm_config, device
        self.requests: dict[str, State] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.input_batch = Batch()
        self.discard_request_mask = SimpleNamespace(np=np.zeros(ENGINE["max_num_seqs"], dtype=bool))
        self._rows: dict[str, Row] | None = None

    def initialize_kv_cache(self, kv_cache_config):
        self.kv_cache_config = kv_cache_config
        self.initialize_kv_cache_tensors(kv_cache_config)

    def initialize_kv_cache_tensors(self, kv_cache_config):
        never_written = 10**6
        self.kv_caches = np.full((LAYERS, kv_cache_config.num_blocks * BLOCK), never_written)

    def execute_model(self, output):
        assert self._rows is None, "sample_tokens was not called"
        self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        assert set(self.input_batch.req_ids) == set(output.num_scheduled_tokens)
        rows = {i: self._row(i, output.num_scheduled_tokens[i]) for i in self.input_batch.req_ids}
        self.discard_request_mask.np[: len(rows)] = [not row.is_sampled for row in rows.values()]
        for cache, name in zip(self.kv_caches, LAYER_NAMES, strict=True):
            self.vllm_config.compilation_config.static_forward_context[name]  # where the lane stops
            for row in rows.values():
                cache[row.slots[row.first :]] = row.tokens
            for row in rows.values():
                row.total += weighted(cache[row.slots].tolist(), 0)
        self._rows = rows
        return None

    def sample_tokens(self, grammar_output):
        rows, self._rows = self._rows, None
        sampled = {i: closing(row.total, len(row.slots)) for i, row in rows.items() if row.is_sampled}
        for req_id in sampled:
            self.requests[req_id].output_token_ids.append(PLACEHOLDER)
        self.input_batch.on_device = sampled
        return ModelRunnerOutput(
            req_ids=list(rows),
            req_id_to_index={req_id: i for i, req_id in enumerate(rows)},
            sampled_token_ids=[[sampled[i]] if i in sampled else [] for i in rows],
        )

    def _row(self, req_id, count):
        state = self.requests[req_id]
        first, end = state.num_computed_tokens, state.num_computed_tokens + count
        tokens = state.tokens[first:end]
        assert len(tokens) == count, f"{req_id} is to compute tokens that its runner does not have"
        if tokens[-1] == PLACEHOLDER:
            tokens[-1] = self.input_batch.on_device[req_id]
        assert PLACEHOLDER not in tokens
        positions = np.arange(end)
        slots = np.array(state.block_ids)[positions // BLOCK] * BLOCK + positions % BLOCK
        return Row(first, tokens, slots, is_sampled=end >= len(state.tokens))

    def _update_states(self, output):
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.input_batch.remove_request(req_id)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for req_id in set(self.input_batch.req_ids) - (output.num_scheduled_tokens.keys() - resumed):
            self.input_batch.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            # Known already: the next turn of a streaming session.
            self.input_batch.remove_request(new.req_id)
            self.requests[new.req_id] = State(new.prompt_token_ids.copy(), list(new.block_ids[0]), new.num_computed_tokens)
            self.input_batch.req_ids.append(new.req_id)
        for i, req_id in enumerate(output.scheduled_cached_reqs.req_ids):
            self._update_cached(req_id, i, output.scheduled_cached_reqs)

    def _update_cached(self, req_id, i, data):
        state, num_output = self.requests[req_id], data.num_output_tokens[i]
        state.num_computed_tokens = data.num_computed_tokens[i]
        del state.output_token_ids[num_output:]
        new_blocks = data.new_block_ids[i]
        if req_id in data.resumed_req_ids:
            assert req_id not in self.input_batch.req_ids
            state.block_ids = []
        state.block_ids.extend(new_blocks[0] if new_blocks else [])
        if req_id in self.input_batch.req_ids:
            return
        if num_output > 0:  # the placeholders are of a step that is not this runner's last
            state.output_token_ids = data.all_token_ids[req_id][-num_output:]
        self.input_batch.req_ids.append(req_id)


class StandInWorker:
    """In the place of vLLM's CPU worker."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        vllm_config.compilation_config.static_forward_context = dict.fromkeys(LAYER_NAMES)
        self.model_runner = StandInRunner(vllm_config, torch.device("cpu"))

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


class StandInPDMuxWorker(PDMuxWorkerMixin, StandInWorker):
    """The real mixin over the stand-in; like a GPU, it may learn some steps later that a batch has ended."""

    report_delay = 0  # steps

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self._step = 0
        self._late = deque()  # (the step that takes it, report)

    def _advance(self, output):
        output = super()._advance(output)
        self._step += 1
        report = report_of(output)
        if report is not None and report.ended:
            self._late.append((self._step + self.report_delay, report))
            output = attach_report(output, replace(report, output=None, error=None))
        if self._late and self._late[0][0] <= self._step:
            output = attach_report(output, self._late.popleft()[1])
        return output


class StandInExecutor(UniProcExecutor):
    """One worker in this process. Its futures are done at once; the engine looks at them two steps later, in order."""

    worker_class = StandInWorker

    def _init_executor(self):
        self.driver_worker = self.worker_class(self.vllm_config)


class StandInPDMuxExecutor(StandInExecutor):
    worker_class = StandInPDMuxWorker


# --- an engine of stand-ins -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before engine step `step`."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 25
    step: int = 0
    stop: Sequence[int] = ()

    @property
    def answer(self) -> list[int]:
        return answer(self.prompt, self.max_tokens, self.stop)

    def request(self, core) -> Request:
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, stop_token_ids=list(self.stop))
        return Request(self.name, list(self.prompt), params, None, block_hasher=core.request_block_hasher)


class Engine:
    """Runs an engine core with asynchronous scheduling, step by step."""

    def __init__(self, model: str, executor: type, pdmux: dict | None, **arguments):
        additional = {} if pdmux is None else {"pdmux": {"trace_steps": 4096, **pdmux}}
        arguments = {**ENGINE, "num_gpu_blocks_override": BLOCKS, "additional_config": additional, **arguments}
        config = EngineArgs(model=model, **arguments).create_engine_config()
        config.scheduler_config.async_scheduling = True  # the CPU platform has just set it to False
        self.core = EngineCore(config, executor, log_stats=True)
        self.scheduler, self.worker = self.core.scheduler, self.core.model_executor.driver_worker

    def fresh(self, layers: int = 1, chunk: int = 256, report_delay: int = 0) -> Engine:
        """As it was when it started, but for the settings."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.max_num_scheduled_tokens = chunk
        if isinstance(self.scheduler, PDMuxAsyncScheduler):
            self.scheduler.pdmux_trace.clear()
            self.scheduler._pdmux_policy = TablePolicy((), 6, 36, LayerRule(layers_per_group=layers))
            self.worker.report_delay = report_delay
        return self

    def run(
        self, arrivals: Sequence[Arrival], after_step: Callable[[Engine], None] | None = None
    ) -> dict[str, list[int]]:
        """Serve all arrivals; the tokens of each, and `self.reasons` why it ended."""
        pending = sorted(arrivals, key=lambda arrival: arrival.step)
        self.tokens, self.reasons = {arrival.name: [] for arrival in arrivals}, {}
        self.step_number = 0
        while pending or self.scheduler.requests or self.core.batch_queue:
            while pending and pending[0].step <= self.step_number:
                self.core.add_request(pending.pop(0).request(self.core))
            self._keep(self.core.step_fn()[0] or {})
            if after_step is not None:
                after_step(self)
            self.step_number += 1
            assert self.step_number < 3000, "not done after 3000 steps"
        return self.tokens

    def _keep(self, outputs):
        for client in outputs.values():
            for output in client.outputs:
                assert output.request_id not in self.reasons, "an output after the end"
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = str(output.finish_reason)

    def in_lane(self, name: str) -> bool:
        batch = self.scheduler._batch
        return batch is not None and name in batch.requests and self.scheduler.requests.get(name) is batch.requests[name]

    def layer(self) -> int:
        return self.worker._prefill_lane._lane.layer

    def lane_steps(self):
        return [step for step in self.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]

    def settle(self):
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def assert_nothing_left(self):
        """No request, KV block, thread or runner state is left over."""
        self.settle()
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still in use"  # one is the null block
        assert not self.worker.model_runner.requests
        if isinstance(scheduler, PDMuxAsyncScheduler):
            lane = self.worker._prefill_lane
            assert scheduler._batch is None and lane._batch_id is None
            assert not lane._runner.requests and not lane._finished_req_ids
            assert not [thread for thread in threading.enumerate() if thread.name == LANE_THREAD]
