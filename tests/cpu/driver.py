# SPDX-License-Identifier: Apache-2.0
"""Drives a real in-process engine step by step: requests arrive and are aborted at given steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tiny_model

ENGINE = {
    "max_model_len": 512,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "dtype": "float32",
    "num_gpu_blocks_override": 256,
    "disable_log_stats": False,
}
LANE_THREAD = "pdmux-prefill"


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before engine step `step`."""

    name: str
    prompt: Sequence[int] | dict[str, Any]  # token ids, or one of vLLM's prompts
    params: Any
    step: int = 0
    priority: int = 0
    lora: Any = None  # vLLM's LoRARequest


@dataclass
class Result:
    """What a request has said when it ended, or when it was aborted."""

    tokens: list[list[int]] = field(default_factory=list)  # one list for each of n
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None


class Driver:
    """One engine. `between_steps` hooks see the driver after each step and may abort."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker.worker
        self.step_number = 0

    def run(
        self,
        arrivals: Sequence[Arrival],
        between_steps: Callable[[Driver], None] | None = None,
        limit: int = 3000,
        later: Sequence[Arrival] = (),
    ) -> dict[str, Result]:
        """Serve all arrivals; results by name. Fails when `limit` steps do not suffice. `later`: those that
        `between_steps` adds itself."""
        pending = sorted(arrivals, key=lambda arrival: arrival.step)
        results: dict[str, Result] = {arrival.name: Result() for arrival in (*arrivals, *later)}
        self.step_number = 0
        while pending or self.engine.has_unfinished_requests():
            while pending and pending[0].step <= self.step_number:
                self.add(pending.pop(0))
            for output in self.engine.step():
                if output.finished or output.outputs:
                    _keep(results[output.request_id], output)
            if between_steps is not None:
                between_steps(self)
            self.step_number += 1
            assert self.step_number < limit, f"not done after {limit} steps"
        return results

    def add(self, arrival: Arrival) -> None:
        prompt = arrival.prompt
        if not isinstance(prompt, dict):
            prompt = {"prompt_token_ids": list(prompt)}
        options = {"priority": arrival.priority, "lora_request": arrival.lora}
        self.engine.add_request(arrival.name, prompt, arrival.params, **options)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def internal_ids(self, name: str) -> list[str]:
        """The scheduler's ids of a request; vLLM adds a suffix to the user's."""
        return [req_id for req_id in self.scheduler.requests if req_id == name or name in req_id.split("-")]

    def in_lane(self, name: str) -> bool:
        """Whether a request's batch is in the prefill lane."""
        ids = self.internal_ids(name)
        return any(req_id in batch.requests for batch in self.scheduler._batches for req_id in ids)

    def layer(self) -> int:
        """Layers of the batch in the lane that have begun."""
        return self.worker._prefill_lane._lane.layer

    def set_layers_per_group(self, layers: int) -> None:
        from vllm_pdmux.policy import LayerRule, TablePolicy

        self.scheduler._pdmux_policy = TablePolicy((), 6, 36, LayerRule(layers_per_group=layers))

    def set_chunk(self, tokens: int) -> None:
        self.scheduler.max_num_scheduled_tokens = tokens

    def fresh(self) -> Driver:
        """Without a prefix cache or a record of earlier tests, so that each starts alike."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()
        self.set_chunk(ENGINE["max_num_batched_tokens"])
        if hasattr(self.scheduler, "pdmux_trace"):
            self.scheduler.pdmux_trace.clear()
            self.set_layers_per_group(2)
        return self

    def settle(self) -> None:
        """Let the engine tell its workers of the requests that finished last."""
        for _ in range(3):
            if self.scheduler.has_requests():
                self.core.step()

    def assert_nothing_left(self) -> None:
        """No request, KV block, thread or runner state is left over."""
        self.settle()
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still in use"  # one is the null block
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not self.worker.model_runner.requests
        if hasattr(scheduler, "_batches"):
            lane = self.worker._prefill_lane
            assert not scheduler._batches and lane._current is None and not lane._queue and not lane._launched
            assert not lane._runner.requests and not lane._finished_req_ids
            assert not [thread for thread in threading.enumerate() if thread.name == LANE_THREAD]


def _keep(result: Result, output: Any) -> None:
    for completion in output.outputs:  # of n samples, those that have something new
        while len(result.tokens) <= completion.index:
            for values in (result.tokens, result.texts, result.finish_reasons, result.stop_reasons, result.logprobs):
                values.append([] if values is result.tokens else None)
        result.tokens[completion.index] = list(completion.token_ids)
        result.texts[completion.index] = completion.text
        result.finish_reasons[completion.index] = completion.finish_reason
        result.stop_reasons[completion.index] = completion.stop_reason
        result.logprobs[completion.index] = completion.logprobs
    result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a random prompt."""
    import random

    return [random.Random(seed * 7919 + i).randrange(tiny_model.EOS) for i in range(length)]
