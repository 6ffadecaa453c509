# SPDX-License-Identifier: Apache-2.0
"""An engine core with asynchronous scheduling over stand-ins for its worker, and requests that arrive step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from driver import ENGINE, LANE_THREAD
from stand_ins import BLOCKS, LAYERS, StandInExecutor, StandInPDMuxExecutor, StandInPDMuxWorker, answer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from vllm_pdmux.admission import Admission
from vllm_pdmux.policy import LayerRule, TablePolicy
from vllm_pdmux.scheduler import PDMuxAsyncScheduler


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before engine step `step`. A resumable one is a turn of the session with its name."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 25
    step: int = 0
    stop: Sequence[int] = ()
    resumable: bool = False
    sampling: dict = field(default_factory=dict)  # for the real model

    @property
    def answer(self) -> list[int]:
        return answer(self.prompt, self.max_tokens, self.stop)

    def request(self, core) -> Request:
        sampling = {"temperature": 0, **self.sampling}
        params = SamplingParams(max_tokens=self.max_tokens, stop_token_ids=list(self.stop), **sampling)
        options = {"block_hasher": core.request_block_hasher, "resumable": self.resumable}
        return Request(self.name, list(self.prompt), params, None, **options)


class Engine:
    """Runs an engine core with asynchronous scheduling, step by step."""

    def __init__(self, model: str, pdmux: dict | None, use_v2: bool = False, executor: type | None = None):
        additional = {} if pdmux is None else {"pdmux": {"trace_steps": 4096, "watchdog_s": 0, **pdmux}}
        arguments = {**ENGINE, "num_gpu_blocks_override": BLOCKS, "additional_config": additional}
        config = EngineArgs(model=model, **arguments).create_engine_config()
        config.scheduler_config.async_scheduling = True  # the CPU platform has just set it to False
        executor = executor or (StandInExecutor if pdmux is None else StandInPDMuxExecutor)
        with mock.patch.object(VllmConfig, "use_v2_model_runner", use_v2):  # on a CPU it is False
            self.core = EngineCore(config, executor, log_stats=True)
        self.scheduler, self.worker = self.core.scheduler, self.core.model_executor.driver_worker
        if executor is UniProcExecutor:
            self.worker = self.worker.worker  # vLLM's worker has a wrapper
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.taken = []  # blocks that no request may have

    def fresh(self, layers: int = 1, chunk: int = 256, report_delay: int = 0, batches: int = 1) -> Engine:
        """As it was when it started, but for the settings."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.max_num_scheduled_tokens = chunk
        if isinstance(self.scheduler, PDMuxAsyncScheduler):
            self.scheduler.pdmux_trace.clear()
            self.scheduler._pdmux_policy = TablePolicy((), 6, 36, LayerRule(layers_per_group=layers))
            self.report_delay = report_delay
            if isinstance(self.worker, StandInPDMuxWorker):
                self.worker.slow_device.delay = report_delay
            self.scheduler._admission = Admission(LAYERS, batches, None)
        return self

    def run(
        self, arrivals: Sequence[Arrival], after_step: Callable[[Engine], None] | None = None
    ) -> dict[str, list[int]]:
        """Serve all arrivals; the tokens of each, and `self.reasons` why it ended."""
        self.pending = sorted(arrivals, key=lambda arrival: arrival.step)
        self.tokens, self.reasons = {arrival.name: [] for arrival in arrivals}, {}
        self.step_number = 0
        while self.pending or self.scheduler.requests or self.core.batch_queue:
            while self.pending and self.pending[0].step <= self.step_number:
                self.core.add_request(self.pending.pop(0).request(self.core))
            self._keep(self._step())
            if after_step is not None:
                after_step(self)
            self.step_number += 1
            assert self.step_number < 1500, "not done after 1500 steps"
        return self.tokens

    def _step(self):
        if self.scheduler.has_requests() or self.core.batch_queue:
            return self.core.step_fn()[0] or {}
        self.core._process_aborts_queue()  # an idle engine has them from its input queue
        return {}

    def abort(self, name: str, in_flight: bool = False) -> None:
        """Between two steps, or so that the engine hears of it in its next update. A session sends no more turns."""
        self.pending = [arrival for arrival in self.pending if arrival.name != name]
        (self.core.aborts_queue.put if in_flight else self.core.abort_requests)([name])

    def _keep(self, outputs):
        for client in outputs.values():
            for output in client.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = str(output.finish_reason)

    def in_lane(self, name: str) -> bool:
        batches = self.scheduler._batches
        return name in {r.request_id for batch in batches for r in batch.alive(self.scheduler.requests)}

    def layer(self) -> int:
        return self.worker._prefill_lane._lane.layer

    def is_launched(self, name: str) -> bool:
        """Whether all layers of its batch have run, though the scheduler does not know yet."""
        current = self.worker._prefill_lane._current
        return current is None or name not in current.req_ids

    def take_free_blocks(self) -> None:
        self.taken += self.pool.get_new_blocks(self.pool.get_num_free_blocks())

    def give_blocks_back(self) -> None:
        self.pool.free_blocks(self.taken)
        self.taken = []

    def lane_steps(self):
        return [step for step in self.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]

    def settle(self):
        self.core._process_aborts_queue()  # those that came after the last step
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def assert_nothing_left(self):
        """No request, KV block, thread or runner state is left over."""
        self.settle()
        scheduler, pool = self.scheduler, self.pool
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still in use"  # one is the null block
        assert not self.worker.model_runner.requests
        if isinstance(scheduler, PDMuxAsyncScheduler):
            lane = self.worker._prefill_lane
            assert not scheduler._batches and lane._current is None and not lane._queue and not lane._launched
            assert not lane._runner.requests and not lane._finished_req_ids
            assert not [thread for thread in threading.enumerate() if thread.name == LANE_THREAD]


class Engines:
    """One engine of each kind; a new one after a failure, so that the next test starts with a sound one."""

    def __init__(self, model: str):
        self.model, self.engines = model, {}

    @contextmanager
    def lend(self, pdmux: bool, use_v2: bool):
        kind = pdmux, use_v2
        engine = self.engines.pop(kind, None) or Engine(self.model, {} if pdmux else None, use_v2)
        try:
            yield engine
        except BaseException:
            engine.worker.shutdown()  # ends its lane's thread
            raise
        self.engines[kind] = engine
