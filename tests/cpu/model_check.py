# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule: vLLM's engine core, our scheduler, worker and lane over stand-ins that compute nothing but tokens.

A schedule says all that may differ between two runs, so that one that fails is replayed from what is printed.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

from driver import LANE_THREAD, prompt
from stand_ins import LAYERS, answer
from virtual_gpu import Fault, TimedExecutor, TimedPDMuxWorker, TimedWorker, VirtualGpu
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched import scheduler as stock_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request, RequestStatus
from watch import Fusing

from vllm_pdmux import leaving, loads
from vllm_pdmux.entering import PREFILL
from vllm_pdmux.messages import PrefillOrder, attach_order, order_of, report_of
from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import PromptWork
from vllm_pdmux.scheduler import Scheduler
from vllm_pdmux.step_times import StepTimes
from vllm_pdmux.worker import lane_device
from vllm_pdmux.worker.lane_device import CudaDevice, HostDevice

MOST_STEPS = 600
PAUSE_STEPS = 6
BLOCK = 8  # tokens: small, so that a schedule is short
STUCK_S = 0.05
ROWS = 6  # requests that run at a time, at most


# --- what a schedule is ----------------------------------------------------------------------------------------------


class Shown:
    """A dataclass that prints what differs from its defaults, so that a schedule is short and can be run again."""

    def __repr__(self) -> str:
        values = [(one.name, getattr(self, one.name)) for one in fields(self)]
        plain = type(self)(**{name: value for name, value in values if name in self.needed})
        shown = [f"{name}={value!r}" for name, value in values if name in self.needed or value != getattr(plain, name)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer, _) -> None:
        """Of Hypothesis."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """One request. Steps are counted from 0; what happens at a step happens before it."""

    needed = ("own_tokens", "max_tokens")

    own_tokens: int
    max_tokens: int
    shared_blocks: int = 0  # of a prefix that all prompts share, before its own tokens
    content: int = 0  # prompts of equal lengths and content are equal
    step: int = 0
    stop_at: int | None = None  # the token of its answer that stops it
    abort: int | None = None  # the step before which it is aborted
    is_abort_in_flight: bool = False  # the engine hears of it in its next update
    is_sent_again: bool = False  # another request comes with its id when it is aborted
    priority: int = 0
    wants_prompt_logprobs: bool = False

    def tokens(self, is_again: bool = False) -> list[int]:
        own = some_prompt(self.own_tokens, 100 + self.content + 50 * is_again)
        return [*some_prompt(self.shared_blocks * BLOCK, 1), *own]

    def answer(self, is_again: bool = False) -> list[int]:
        return answer(self.tokens(is_again), self.max_tokens, self.stop(is_again))

    def stop(self, is_again: bool) -> list[int]:
        return [] if self.stop_at is None else [answer(self.tokens(is_again), self.stop_at + 1)[-1]]


some_prompt = cache(prompt)


@dataclass(frozen=True, repr=False)
class Schedule(Shown):
    """What happens to an engine."""

    needed = ("plans",)

    plans: tuple[Plan, ...]
    use_v2: bool = False
    look_ahead: int = 0  # steps that are scheduled before the tokens of the one before are known
    has_gpu: bool = True
    is_stock: bool = False  # without the plugin
    settings: dict = field(default_factory=dict)  # of the plugin
    fused: tuple[int, int] | None = None  # stock steps in between: prompt tokens, every how many times
    chunk: int = 256
    kv_blocks: int = 24
    has_priorities: bool = False
    decode_ms: tuple[float, ...] = (1.0,)
    layer_ms: tuple[float, ...] = (1.0,)
    host_ms: float = 0.01
    is_read_early: bool = False
    faults: dict[int, int | str] = field(default_factory=dict)  # by the number of a batch: its layer, sample or output
    events: dict[int, str] = field(default_factory=dict)  # by step

    @property
    def named(self) -> dict[str, Plan]:
        return {f"r{number}": plan for number, plan in enumerate(self.plans)}


# --- the engine ------------------------------------------------------------------------------------------------------


class Lab:
    """One engine core of vLLM's, which each schedule gives a scheduler and a worker of its own."""

    def __init__(self, engine):
        self.core = engine.core
        assert isinstance(self.core.model_executor, TimedExecutor)
        self.core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self._config = self.core.vllm_config
        kv_cache_config = self.core.scheduler.kv_cache_config
        groups = [
            replace(group, kv_cache_spec=replace(group.kv_cache_spec, block_size=BLOCK))
            for group in kv_cache_config.kv_cache_groups
        ]
        self._kv_cache_config = replace(kv_cache_config, kv_cache_groups=groups)

    @contextmanager
    def lend(self, schedule: Schedule):
        gpu = VirtualGpu(schedule.decode_ms, schedule.layer_ms, schedule.host_ms, schedule.is_read_early)
        clock = SimpleNamespace(time=gpu.clock_s, monotonic=gpu.clock_s)
        with (
            mock.patch.object(VllmConfig, "use_v2_model_runner", schedule.use_v2),
            mock.patch.object(lane_device, "torch", SimpleNamespace(cuda=gpu.cuda)),
            mock.patch.object(loads, "time", clock),
            mock.patch.object(leaving, "time", clock),
            mock.patch.object(stock_scheduler, "time", clock),
            quiet(),
        ):
            scheduler, worker = self._scheduler(schedule, gpu), self._worker(schedule, gpu)
            self.core.scheduler, self.core.model_executor.driver_worker = scheduler, worker
            self.core.batch_queue_size = schedule.look_ahead + 1
            self.core.batch_queue = deque(maxlen=schedule.look_ahead + 1) if schedule.look_ahead else None
            self.core.step_fn = self.core.step_with_batch_queue if schedule.look_ahead else self.core.step
            try:
                yield gpu, scheduler, worker
            finally:
                worker.shutdown()
            assert not [thread for thread in threading.enumerate() if thread.name == LANE_THREAD]

    def _config_of(self, schedule: Schedule) -> VllmConfig:
        config = copy.copy(self._config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = schedule.look_ahead > 0
        config.scheduler_config.max_num_batched_tokens = config.scheduler_config.max_num_scheduled_tokens = (
            schedule.chunk
        )
        config.scheduler_config.max_num_seqs = ROWS
        config.scheduler_config.policy = "priority" if schedule.has_priorities else "fcfs"
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = schedule.kv_blocks, BLOCK
        config.compilation_config = copy.copy(config.compilation_config)
        config.additional_config = {"pdmux": {"calibration": "off", "watchdog_s": 0.0, **schedule.settings}}
        if schedule.settings.get("policy") != "slo":
            del config.additional_config["pdmux"]["calibration"]
        config.device_config = SimpleNamespace(device_type="cuda" if schedule.has_gpu else "cpu")
        return config

    def _scheduler(self, schedule: Schedule, gpu: VirtualGpu):
        self._vllm_config = self._config_of(schedule)
        stock = AsyncScheduler if schedule.look_ahead else StockScheduler
        scheduler = (stock if schedule.is_stock else Scheduler)(
            vllm_config=self._vllm_config,
            kv_cache_config=replace(self._kv_cache_config, num_blocks=schedule.kv_blocks),
            structured_output_manager=self.core.structured_output_manager,
            log_stats=True,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        if schedule.is_stock:
            return scheduler
        scheduler._step_times = StepTimes(gpu.clock_s)
        if schedule.fused is not None:
            scheduler._pdmux_policy = Fusing(scheduler._pdmux_policy, *schedule.fused)
            scheduler._observer = Observer(scheduler._pdmux_policy, PromptWork(1000))
        return scheduler

    def _worker(self, schedule: Schedule, gpu: VirtualGpu):
        kind = TimedWorker if schedule.is_stock else TimedPDMuxWorker
        worker = kind(self._vllm_config, gpu, schedule.has_gpu, dict(schedule.faults))
        worker.initialize_from_config([replace(self._kv_cache_config, num_blocks=schedule.kv_blocks)])
        return worker


@contextmanager
def quiet():
    """What fails on purpose is not told of."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- running a schedule ----------------------------------------------------------------------------------------------


class Run:
    """A schedule in an engine, step by step."""

    def __init__(self, lab: Lab, schedule: Schedule, gpu: VirtualGpu, scheduler, worker):
        self.lab, self.core, self.schedule = lab, lab.core, schedule
        self.gpu, self.scheduler, self.worker = gpu, scheduler, worker
        self.pool = scheduler.kv_cache_manager.block_pool
        self.taken = []  # blocks that no request may have
        self.step = 0
        self.said: dict[tuple[str, bool], list[int]] = {}  # by name, and whether it is the one that was sent again
        self.ends: dict[tuple[str, bool], list[str]] = {}
        self.sent_again: set[str] = set()
        self.aborted: set[tuple[str, bool]] = set()
        self.given_up: set[str] = set()  # with the lane
        self.is_stuck = False  # the lane, as soon as it has something to do
        self.counts = Counter()

    def run(self) -> None:
        last = max([plan.step for plan in self.schedule.plans] + [one for one in self.schedule.events])
        while self.step <= last or self.scheduler.requests or self.core.batch_queue or self.taken:
            self.one_step()
            assert self.step < MOST_STEPS, "not done"
        self._settle()

    def one_step(self) -> None:
        self._happen()
        if self.scheduler.has_requests() or self.core.batch_queue:
            self._keep(self.core.step_fn()[0] or {})
        else:
            self.core._process_aborts_queue()
            self.gpu.now_s += 1e-3
        self.step += 1

    def _settle(self) -> None:
        self.core._process_aborts_queue()
        while self.scheduler.has_requests() or self.core.batch_queue:
            self._keep(self.core.step_fn()[0] or {})
            self.gpu.now_s += 1e-3 if getattr(self.scheduler, "_lost", ()) else 0.0

    def _happen(self) -> None:
        for name, plan in self.schedule.named.items():
            if plan.step == self.step:
                self._send(name, plan)
            if plan.abort == self.step and name in self.scheduler.requests:
                self._abort(name, plan)
        if (event := self.schedule.events.get(self.step)) is not None:
            getattr(self, f"_{event}")()
        if self.is_stuck:
            self._stand_still()
        if self.step - PAUSE_STEPS in self.schedule.events:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
            self._give_back()

    def _send(self, name: str, plan: Plan, is_again: bool = False) -> None:
        params = SamplingParams(
            max_tokens=plan.max_tokens,
            stop_token_ids=plan.stop(is_again),
            temperature=0,
            prompt_logprobs=1 if plan.wants_prompt_logprobs else None,
        )
        request = Request(
            name,
            plan.tokens(is_again),
            params,
            None,
            arrival_time=self.gpu.now_s,
            priority=plan.priority,
            block_hasher=self.core.request_block_hasher,
        )
        self.said[name, is_again], self.ends[name, is_again] = [], []
        self.core.add_request(request)
        self.counts["requests"] += 1

    def _abort(self, name: str, plan: Plan) -> None:
        self.counts["aborts"] += 1
        self.aborted.add((name, False))
        if plan.is_abort_in_flight:
            self.core.aborts_queue.put([name])
            return
        self.core.abort_requests([name])
        # Stock vLLM takes the tokens of a step in flight for those of whoever has the id by then.
        in_flight = any(name in output.num_scheduled_tokens for _, output, _ in self.core.batch_queue or ())
        if plan.is_sent_again and not in_flight:
            self.sent_again.add(name)
            self._send(name, plan, is_again=True)

    def _keep(self, outputs) -> None:
        for client in outputs.values():
            for output in client.outputs:
                key = output.request_id, output.request_id in self.sent_again
                assert not self.ends[key], f"{output.request_id} says something after its end"
                self.said[key] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ends[key].append(str(output.finish_reason))
                    self.counts["errors"] += self.ends[key] == ["error"]

    def check_answers(self) -> None:
        failed = {name for names in type(self.worker.model_runner).failed for name in names}
        for (name, is_again), said in self.said.items():
            expected, ends = self.schedule.named[name].answer(is_again), self.ends[name, is_again]
            assert said == expected[: len(said)], f"tokens of {name}"
            assert len(ends) <= 1, f"{name} ended {len(ends)} times"
            if ends == ["error"]:
                assert name in failed | self.given_up, (
                    f"{name} ended with an error though nothing was raised in its batch"
                )
            elif ends:
                assert said == expected, f"tokens of {name}"
            else:
                assert (name, is_again) in self.aborted, f"{name} has not ended"

    def check_nothing_left(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still in use"  # one is the null block
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        self._check_empty(self.worker.model_runner)

    def _check_empty(self, runner) -> None:
        assert not runner.requests, "a runner still knows a request"
        if not self.schedule.use_v2:
            assert not runner.input_batch.rows and not runner.num_prompt_logprobs

    # --- events ------------------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """What the scheduler does when it is out of blocks, to the last that decodes."""
        batches = () if self.schedule.is_stock else self.scheduler._batches
        in_lane = {req_id for batch in batches for req_id in batch.requests}
        for request in reversed(self.scheduler.running):
            if request.request_id not in in_lane:
                self.scheduler.running.remove(request)
                self.scheduler._preempt_request(request, 0.0)
                self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
                return

    def _squeeze(self) -> None:
        """For some steps there are no blocks left."""
        self.taken += self.pool.get_new_blocks(self.pool.get_num_free_blocks())

    def _give_back(self) -> None:
        self.pool.free_blocks(self.taken)
        self.taken = []

    def _reset(self) -> None:
        """All running requests are preempted and the prefix cache is emptied."""
        self._give_back()
        try:
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            assert self.scheduler._lost and "is given up" in str(error)

    def _reset_idle(self) -> None:
        self.scheduler.reset_prefix_cache()

    def _pause(self) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def _pause_new(self) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)

    def _give_up(self) -> None:
        """The lane stands still, from when it has something to do, and the watchdog has seen it."""
        self.is_stuck = not self.schedule.is_stock

    def _stand_still(self) -> None:
        lane = self.worker._prefill_lane
        if (progress := lane.progress()) is None:
            return
        if self.schedule.has_gpu and lane._device._stream is not self.gpu.decode:
            lane._device._stream.run(STUCK_S)  # what is queued takes long
            lane._queued = lane._device.end()
        lane.give_up(progress, 1.0)
        self.is_stuck = False

    def _exchange_weights(self) -> None:
        """vLLM's pause mode "keep"."""
        self._pause()
        self._reset()


EVENTS = ("preempt", "squeeze", "reset", "reset_idle", "pause", "pause_new", "exchange_weights", "give_up", "give_up")


# --- what must hold --------------------------------------------------------------------------------------------------


class Checked(Run):
    """Looks at the books of the scheduler and at the lane whenever something is scheduled or comes back."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lane = self.worker._prefill_lane
        assert isinstance(self.lane._device, CudaDevice if self.schedule.has_gpu else HostDevice)
        self.layers_of: dict[int, int] = {}  # by batch: where it stands, by the reports
        self.idle_steps = 0
        self.lost_blocks = []  # which layers that were given up may still write to
        self.lost_until_s: dict[int, float] = {}  # by the last batch that was given up: when the last layer has run
        self.raised = 0  # batches, as the lane has it
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output
        execute, sample = self.worker.execute_model, self.worker.sample_tokens
        preempt, take = self.scheduler._preempt_request, self.lane._take

        def checked_schedule(*arguments):
            output = schedule(*arguments)
            self._check_scheduled(output)
            return output

        def checked_update(output, result):
            report = report_of(result)
            self._check_report(output, report)
            doomed = self._batch_requests(report) if report is not None and report.error is not None else []
            if report is not None and report.stalled_s and not doomed:  # what is behind one that raised starts again
                doomed = self._lose(report)
            if report is not None and report.back is not None:
                assert self.gpu.now_s >= self.lost_until_s[report.back], "lost layers still run"
                if report.back == max(self.lost_until_s):
                    self.lost_blocks.clear()
            outputs = update(output, result)
            assert all(request.status == RequestStatus.FINISHED_ERROR for request in doomed), (
                "a batch that raised lives"
            )
            self._check_books()
            return outputs

        def checked_execute(output):
            order = order_of(output)
            if order.lose is not None and self.schedule.has_gpu:
                self.lost_until_s[order.lose] = self.lane._device._stream.end_s
            with self._decode_does_not_wait(output.num_scheduled_tokens and order.drop is None):
                result = execute(output)
            self.decodes = bool(output.num_scheduled_tokens)
            return result

        def checked_sample(grammar):
            with self._decode_does_not_wait(self.decodes):
                return sample(grammar)

        def counted_preempt(*arguments, **options):
            self.counts["preemptions"] += 1
            preempt(*arguments, **options)

        def checked_take():
            result, error = take()
            assert error is None or error.startswith(Fault.__name__), error
            self.raised += error is not None
            return result, error

        self.scheduler.schedule, self.scheduler.update_from_output = checked_schedule, checked_update
        self.scheduler._preempt_request = counted_preempt
        self.worker.execute_model, self.worker.sample_tokens = checked_execute, checked_sample
        self.lane._take = checked_take

    @contextmanager
    def _decode_does_not_wait(self, asked: object):
        """The decode stream for prefill, if `asked`, unless a batch has raised. With nothing to decode prefill may have
        that stream."""
        waits, raised = self.gpu.waits_of_decode, self.raised
        yield
        if asked and self.raised == raised:
            assert self.gpu.waits_of_decode == waits, "decode waits for prefill"

    def _check_scheduled(self, output) -> None:
        order = order_of(output)
        self.counts["steps"] += 1
        self.counts["batches"] += order.start is not None
        self.counts["drops"] += order.drop is not None
        for batch in self.scheduler._batches:
            assert not batch.requests.keys() & output.num_scheduled_tokens.keys(), "a request is in both lanes"
            in_use = [block for blocks in batch.held_blocks for block in blocks]
            for request in batch.alive(self.scheduler.requests):
                groups = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
                in_use += [block for group in groups for block in group]
            assert all(block.ref_cnt > 0 for block in in_use), "a block is free while layers are to write it"
        assert all(block.ref_cnt > 0 for block in self.lost_blocks), "a block is free while lost layers may write it"
        busy = output.total_num_scheduled_tokens > 0 or order.batch_id is not None
        has_work = self.scheduler.has_unfinished_requests()
        if not busy and self.scheduler._lost:  # it waits for their blocks
            self.gpu.now_s += 1e-3
            busy = True
        self.idle_steps = self.idle_steps + 1 if has_work and not busy and not self.taken else 0
        # Those in flight may have been scheduled for all that is left to do.
        assert self.idle_steps <= self.schedule.look_ahead + 1, "no lane does anything"
        self._check_books()

    def _check_books(self) -> None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), [*scheduler.waiting, *scheduler.kv_holding_waiting]
        ids = [request.request_id for request in (*running, *waiting)]
        assert len(ids) == len(set(ids)) and set(ids) == set(scheduler.requests), (
            "a request is twice in the queues, or lost"
        )
        lost = {block_id for batch in scheduler._lost for block_id in batch.new_blocks}
        for block in self.pool.blocks:
            assert block.block_id not in lost or block.block_hash is None, "a lost block is in the prefix cache"
        for request in scheduler.requests.values():
            groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            assert not lost & {block_id for group in groups for block_id in group}, "a request has a lost block"
        assert all(request.status == RequestStatus.RUNNING for request in running)
        assert all(request.status != RequestStatus.RUNNING for request in waiting)
        for request in scheduler.requests.values():
            assert request.num_output_placeholders >= 0
            assert 0 <= request.num_stale_output_tokens <= request.num_in_flight_tokens

    def _check_report(self, output, report) -> None:
        order = order_of(output)
        if report is None:
            return
        self.counts["faults"] += report.error is not None
        for run in report.runs:
            assert run.first_layer == self.layers_of.get(run.batch_id, 0), "a layer was left out or run twice"
            assert run.end_layer > run.first_layer or report.error is not None or order.layers > LAYERS
            self.layers_of[run.batch_id] = run.end_layer
        if report.output is not None:
            assert self.layers_of[report.batch_id] in (LAYERS, 0 if self.is_serial else LAYERS)
            self.counts["batches ended"] += 1
            batch = self.scheduler._batch(report.batch_id)
            self.counts["joins"] += 0 if batch is None else batch.num_joined(self.scheduler.requests)

    def _abort(self, name: str, plan: Plan) -> None:
        super()._abort(name, plan)
        batches = self.scheduler._batches
        alive = [request for batch in batches for request in batch.alive(self.scheduler.requests)]
        assert plan.is_abort_in_flight or alive or not batches, "the lane works for nobody"

    def _lose(self, report) -> list[Request]:
        """The requests that are given up with the lane; one whose batch has just ended is not."""
        batches = [batch for batch in self.scheduler._batches if not (report.ended and batch.id == report.batch_id)]
        alive = [request for batch in batches for request in batch.alive(self.scheduler.requests)]
        doomed = [request for request in alive if request.status == RequestStatus.RUNNING]
        if batches and self.scheduler._residency is not None:
            # Those whose prompt logprobs are gathered in the lane, though none of their chunks is there now, are too.
            lane_of = self.scheduler._residency.lane_of
            doomed += [one for one in self.scheduler._bound_prompts() if lane_of(one.request_id) == PREFILL]
        self.given_up |= {request.request_id for request in doomed}
        for batch in batches:
            self.lost_blocks += [block for blocks in batch.held_blocks for block in blocks]
        for request in alive:
            groups = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
            self.lost_blocks += [block for group in groups for block in group]
        self.counts["losses"] += bool(batches)
        return doomed

    def _batch_requests(self, report) -> list[Request]:
        batch = self.scheduler._batch(report.batch_id)
        return [] if batch is None else batch.alive(self.scheduler.requests)

    @property
    def is_serial(self) -> bool:
        return self.schedule.settings.get("lane") == "serial"

    def check_nothing_left(self) -> None:
        # The lane forgets a request that ended before its batch with the next step.
        self.worker.execute_model(attach_order(SchedulerOutput.make_empty(), self._nothing_to_do()))
        super().check_nothing_left()
        scheduler, lane = self.scheduler, self.lane
        assert not scheduler._batches and not scheduler._lost and scheduler._drop is None and scheduler._lose is None
        assert scheduler._residency is None or not scheduler._residency._lane
        assert lane._current is None and not lane._queue and not lane._launched
        assert not lane._in_lane and not lane._finished_req_ids
        self._check_empty(lane._runner)

    def _nothing_to_do(self) -> PrefillOrder:
        return PrefillOrder(ended=self.scheduler._last_ended())


def check(lab: Lab, schedule: Schedule) -> Counter:
    """Run a schedule; what happened in it, counted."""
    with lab.lend(schedule) as parts:
        run = (Run if schedule.is_stock else Checked)(lab, schedule, *parts)
        run.run()
        run.check_answers()
        run.check_nothing_left()
        return run.counts
