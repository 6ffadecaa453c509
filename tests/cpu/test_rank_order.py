# SPDX-License-Identifier: Apache-2.0
"""Ranks that learn of their GPU at different moments launch the same, layer by layer and in the same order.

Two stand-in workers (stand_ins.py) under one asynchronous engine, each with the real RankDevice on a GPU of its own
pace. Only the first one's outputs are read, as vLLM reads them: what the scheduler is told comes from that rank alone.
"""

import copy
import random
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import test_async
from async_engine import Engine
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import StandInExecutor, StandInPDMuxWorker
from watch import fuse_now_and_then

from vllm_pdmux.messages import LaneReport, Run
from vllm_pdmux.pace import FIRST_WINDOW, LONGEST_WINDOW, MARGIN, STEPS_UNDER_WAY, Pace
from vllm_pdmux.policy import ALL_LAYERS, Decision
from vllm_pdmux.policy.types import Unlearning, decide_alone
from vllm_pdmux.worker import lane_device
from vllm_pdmux.worker.lane_device import CudaDevice, RankDevice

SLOWEST, FASTEST = 0.05, 1.0  # the chance that something has ended when the host looks


class Gpu:
    """The stream of everything, and the pace at which what is queued on it ends."""

    device = 0

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._speed = self._random.uniform(SLOWEST, FASTEST)
        self._now_s = 0.0

    def is_over(self):
        return self._random.random() < self._speed

    def clock_s(self):
        self._now_s += self._random.random() * 1e-3
        return self._now_s

    def wait_stream(self, other): ...

    def wait_event(self, event): ...


class Event:
    def record(self, gpu):
        self._gpu, self._is_over = gpu, False

    def query(self):
        self._is_over = self._is_over or self._gpu.is_over()
        return self._is_over


def on(kind, gpu):
    """A device of this kind, in the test's own thread."""

    class Device(kind):
        keep_thread, workspace = False, 0

        def enter(self): ...

        def is_done(self, output):
            return gpu.is_over()

    return Device(gpu, {0: gpu, 1: gpu}, gpu.clock_s)


class Output(Future):
    """Of a step of the first worker; looking at it resolves those before it too, as vLLM's thread does."""

    def __init__(self, resolve):
        super().__init__()
        self._resolve = resolve

    def result(self, timeout=None):
        if not self.done():
            self._resolve()
        return super().result()


class TwoRanks(StandInExecutor):
    """Both workers get each message, a copy of their own. The second one's outputs are not looked at.

    The first one's are resolved when the engine asks for them or, as on vLLM's thread, before.
    """

    worker_class = StandInPDMuxWorker

    def _init_executor(self):
        super()._init_executor()
        self.second = self.worker_class(self.vllm_config)
        self._random, self._unresolved = random.Random(2), deque()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, **options):
        if method != "shutdown":
            getattr(self.second, method)(*copy.deepcopy(args), **(kwargs or {}))
        result = super().collective_rpc(method, timeout, args, kwargs, **options)
        if not options.get("non_block"):
            return result
        output = Output(self._resolve)
        self._unresolved.append((output, result))
        if self._random.random() < 0.5:
            self._resolve()
        return output

    def _resolve(self):
        while self._unresolved:
            output, result = self._unresolved.popleft()
            output.set_result(result.result())


class Layers(Unlearning):
    """Another number of layers at each step."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def decide(self, load):
        either = Decision(self._random.choice([0, 1]), self._random.choice([1, 2, 5, ALL_LAYERS]))
        return decide_alone(load, 1) or either


@pytest.fixture(scope="module")
def engines(tiny_model_path):
    made = {}

    def engine(use_v2):
        if use_v2 not in made:
            made[use_v2] = Engine(tiny_model_path, {}, use_v2, TwoRanks)
        return made[use_v2]

    return SimpleNamespace(get=engine, forget=lambda use_v2: made.pop(use_v2))


def launched_by_ranks(engines, use_v2, schedule, seed, kind=RankDevice):
    """What each rank has launched in a schedule: the lane, the layer and the requests, in order."""
    engine = engines.get(use_v2)
    workers = engine.worker, engine.core.model_executor.second
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_device.torch.cuda, "Event", Event)
        for rank, worker in enumerate(workers):
            lane, of_rank = worker._prefill_lane, []
            launched.append(of_rank)
            patch.setattr(lane, "_device", on(kind, Gpu(2 * seed + rank)))
            for name, runner in (("decode", worker.model_runner), ("prefill", lane._runner)):
                patch.setattr(
                    runner,
                    "at_layer",
                    lambda layer, inputs, name=name, of_rank=of_rank: of_rank.append((name, layer, sorted(inputs))),
                )
        engine.fresh(schedule.layers, schedule.chunk, 0, schedule.batches if use_v2 else 1)
        engine.scheduler._pdmux_policy, engine.scheduler._pace = Layers(seed), Pace()
        fuse_now_and_then(engine.scheduler, schedule.fused)
        try:
            test_async.check_schedule(engine, schedule, lambda: None)
        except BaseException:
            engines.forget(use_v2)
            raise
        assert_nothing_left(workers[1])
    return launched


def assert_nothing_left(worker):
    """On the rank that nobody has asked for an output."""
    lane = worker._prefill_lane
    assert not worker.model_runner.requests and not lane._runner.requests
    while not lane._behind.query():  # layers of what was dropped last may have to end yet
        pass
    assert lane.progress() is None and not lane._in_lane and not lane._finished_req_ids


@pytest.mark.parametrize("use_v2", [False, True], ids=["V1", "V2"])
@test_async.random_schedules
@given(schedule=test_async.some_schedule(), seed=st.integers(0, 10**6))
def test_all_ranks_launch_the_same(engines, use_v2, schedule, seed):
    first, second = launched_by_ranks(engines, use_v2, schedule, seed)
    assert first == second
    assert first


def test_ranks_that_look_for_themselves_are_found(engines):
    found = []

    @test_async.random_schedules
    @given(schedule=test_async.some_schedule(), seed=st.integers(0, 10**6))
    def search(schedule, seed):
        if not found:
            first, second = launched_by_ranks(engines, True, schedule, seed, CudaDevice)
            found.extend(["different"] if first != second else [])

    search()
    assert found


# --- the pace -------------------------------------------------------------------------------------------------------


class Queue:
    """A device that begins so many layers a step; its reports come `late` steps later."""

    def __init__(self, begins, late):
        self.pace, self.queued, self.begins = Pace(), 0, begins
        self.under_way = [(0, None)] * late
        self.dry_steps = self.most_queued = 0

    def step(self, wanted, is_first=False):
        ordered = self.pace.layers(wanted, is_first)
        was_busy = self.queued > 0
        self.queued += ordered
        self.most_queued = max(self.most_queued, self.queued)
        report = LaneReport(0, (Run(0, 0, ordered),), was_busy and self.queued > 0, lead_layers=self.queued)
        self.under_way.append((ordered, report))
        self.pace.reported(*self.under_way.pop(0))
        self.dry_steps += self.queued < self.begins
        self.queued = max(0, self.queued - self.begins)
        return ordered


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("begins", [1, 3, 8])
def test_the_queue_neither_runs_dry_nor_grows(begins, late):
    queue = Queue(begins, late)
    for _ in range(60):
        queue.step(ALL_LAYERS)
    dry = queue.dry_steps
    for _ in range(200):
        queue.step(ALL_LAYERS)
    assert queue.dry_steps == dry, "after a while the device has always enough to begin"
    assert queue.most_queued <= LONGEST_WINDOW


def test_a_device_that_does_not_begin_gets_no_more_than_the_window():
    queue = Queue(0, 2)
    ordered = [queue.step(ALL_LAYERS) for _ in range(100)]
    # Its queue was empty in the first step, which is not distinguished from one that has run dry.
    assert sum(ordered) <= 2 * FIRST_WINDOW and not any(ordered[5:])


def test_no_more_than_was_wanted():
    assert Pace().layers(2, is_first=True) == 2


def test_a_batch_begins_with_a_layer_though_the_window_is_full():
    queue = Queue(0, 2)
    while queue.step(ALL_LAYERS):
        pass
    assert queue.step(ALL_LAYERS, is_first=True) == 1


def test_an_order_that_was_void_leaves_the_window_open():
    pace = Pace()
    ordered = pace.layers(ALL_LAYERS, is_first=True)
    pace.reported(ordered, None)
    assert pace.layers(ALL_LAYERS, is_first=False) == ordered


def reported(pace, ordered, is_saturated, queued=0):
    """The step has come back that ordered so many layers, of which so many are queued."""
    pace.reported(ordered, LaneReport(0, (Run(0, 0, ordered),), is_saturated, lead_layers=queued))


def test_the_window_grows_by_a_half_while_it_is_too_small_for_a_device_that_runs_dry():
    pace, windows = Pace(), []
    for _ in range(8):
        windows.append(pace.layers(ALL_LAYERS, is_first=False))
        reported(pace, windows[-1], is_saturated=False)
    assert windows == [4, 6, 9, 13, 19, 28, 42, 48] and all(isinstance(window, int) for window in windows)


def test_where_all_that_was_wanted_was_ordered_the_device_ran_dry_for_want_of_layers():
    """Then it is known what it begins in a step: enough of that for the steps under way."""
    pace = Pace()
    assert pace.layers(FIRST_WINDOW, is_first=False) == FIRST_WINDOW
    reported(pace, FIRST_WINDOW, is_saturated=False)
    assert pace.layers(ALL_LAYERS, is_first=False) == FIRST_WINDOW * STEPS_UNDER_WAY + MARGIN


def test_the_window_never_shrinks_below_the_first_one():
    pace = Pace()
    for _ in range(5):
        ordered = pace.layers(0, is_first=False)
        reported(pace, ordered, is_saturated=True)
    assert pace.layers(ALL_LAYERS, is_first=False) == FIRST_WINDOW
