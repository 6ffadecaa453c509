# SPDX-License-Identifier: Apache-2.0
"""What the streams of a GPU are ordered by is enough: no layer touches KV that another stream may still touch.

The real CudaDevice, over streams and events that only keep time as vector clocks: an operation is ordered behind
another one if its stream, or the host when it launched it, knew of that one's end. Every layer of every forward pass of
the stand-in runners (stand_ins.py) notes which slots of the KV cache it reads and writes; two accesses of which one
writes must be ordered. Schedules, groups, the pace of the GPU and what the host learns when are random.
"""

import random

import numpy as np
import pytest
import test_async
from async_engine import Engines
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import LAYERS
from watch import fuse_now_and_then

from vllm_pdmux.messages import report_of
from vllm_pdmux.policy import ALL_LAYERS, Decision
from vllm_pdmux.policy.types import Unlearning, decide_alone
from vllm_pdmux.worker import lane_device
from vllm_pdmux.worker.lane_device import CudaDevice

DECODE = 0  # the number of the decode stream
STREAMS = 3
SLOWEST, FASTEST = 0.05, 1.0  # the chance that something has ended when the host looks


class Stream:
    device = 0

    def __init__(self, number):
        self.number = number
        self.known = np.zeros(STREAMS, dtype=np.int64)  # of each stream, the operations that its next one comes after

    def wait_stream(self, other):
        self.known = np.maximum(self.known, other.known)

    def wait_event(self, event):
        self.known = np.maximum(self.known, event.known)


class Event:
    gpu: "Gpu"

    def record(self, stream):
        self.known, self._has_ended = stream.known, False

    def query(self):
        self._has_ended = self._has_ended or self.gpu.is_over()
        return self._has_ended


class Gpu:
    """Streams, what the host knows of them, and the last access of each to every slot of every layer."""

    def __init__(self, seed, slots):
        self.random = random.Random(seed)
        self._speed = self.random.uniform(SLOWEST, FASTEST)
        self.streams = [Stream(number) for number in range(STREAMS)]
        self.host = np.zeros(STREAMS, dtype=np.int64)
        self._count = [0] * STREAMS
        self._written, self._read = np.zeros((2, STREAMS, LAYERS, slots), dtype=np.int64)
        self._now_s = 0.0
        self.races = []

    def is_over(self):
        return self.random.random() < self._speed

    def clock_s(self):
        self._now_s += self.random.random() * 1e-3
        return self._now_s

    def learns(self, known):
        """The host has seen the end of something that came after all that is `known`."""
        self.host = np.maximum(self.host, known)

    def run(self, stream, layer, reads, writes, what):
        stream.known = np.maximum(stream.known, self.host)
        for other in range(STREAMS):
            if other == stream.number:
                continue
            seen = stream.known[other]
            accesses = [("read", self._written, reads), ("write", self._written, writes), ("write", self._read, writes)]
            if wrong := [kind for kind, last, slots in accesses if (last[other, layer, slots] > seen).any()]:
                self.races.append((wrong, f"stream {stream.number} after {other}, layer {layer}", what))
        self._count[stream.number] += 1
        stream.known = stream.known.copy()
        stream.known[stream.number] = self._count[stream.number]
        self._read[stream.number, layer, reads] = self._count[stream.number]
        self._written[stream.number, layer, writes] = self._count[stream.number]


class Device(CudaDevice):
    """The real one on a Gpu, in the test's own thread."""

    keep_thread = False
    workspace = 0

    def __init__(self, gpu):
        super().__init__(gpu.streams[DECODE], dict(enumerate(gpu.streams)), gpu.clock_s)
        self._gpu = gpu

    def enter(self):
        self._entered = self._stream

    def is_done(self, output):
        return self._gpu.is_over()

    @property
    def stream(self):
        return self._stream


class Groups(Unlearning):
    """Another group and other layers at each step."""

    def __init__(self, seed, layers):
        self._random, self._layers = random.Random(seed), layers

    def decide(self, load):
        either = Decision(self._random.choice([1, 2]), self._random.choice([self._layers, 1, 2, ALL_LAYERS]))
        return decide_alone(load, 2) or either


class Watched:
    """An engine whose lane has a Gpu; what its host learns, it learns where vLLM's does."""

    def __init__(self, engine, gpu, device, patch):
        self._gpu, self._device = gpu, device
        self._lane, self._worker, self._scheduler = engine.worker._prefill_lane, engine.worker, engine.scheduler
        self._steps, self._batches = {}, {}  # what was known where each ended
        self._stock = self._lane._take, self._worker.execute_model, self._scheduler.update_from_output
        patch.setattr(self._lane, "_device", device)
        patch.setattr(self._lane, "_take", self._take)
        patch.setattr(self._worker, "execute_model", self._execute_model)
        patch.setattr(self._scheduler, "update_from_output", self._update_from_output)
        for runner in (engine.worker.model_runner, self._lane._runner):
            patch.setattr(runner, "at_layer", self._at_layer_of(runner is engine.worker.model_runner))

    def _at_layer_of(self, is_decode):
        def at_layer(layer, inputs):
            stream = self._gpu.streams[DECODE] if is_decode else self._device.stream
            reads = np.concatenate([part.slots for part in inputs.values()])
            writes = np.concatenate([part.slots[part.first :] for part in inputs.values()])
            self._gpu.run(stream, layer, reads, writes, list(inputs))

        return at_layer

    def _take(self):
        batch_id = self._lane._current.id
        result = self._stock[0]()
        self._batches[batch_id] = self._device.stream.known
        return result

    def _execute_model(self, output):
        result = self._stock[1](output)
        self._steps[id(output)] = self._gpu.streams[DECODE].known  # its layers of the lane come later
        return result

    def _update_from_output(self, output, result):
        known = self._steps.pop(id(output))
        if output.total_num_scheduled_tokens:
            self._gpu.learns(known)
        if (report := report_of(result)) is not None and report.output is not None:
            self._gpu.learns(self._batches[report.batch_id])
        return self._stock[2](output, result)


@pytest.fixture(scope="module")
def engines(tiny_model_path):
    return Engines(tiny_model_path)


def races(engines, use_v2, schedule, seed, kind=Device):
    """What a schedule does to KV that another stream may still touch."""
    with pytest.MonkeyPatch.context() as patch, engines.lend(True, use_v2) as engine:
        gpu = Gpu(seed, engine.worker.model_runner.kv_caches.shape[1])
        patch.setattr(lane_device.torch.cuda, "Event", Event)
        patch.setattr(Event, "gpu", gpu, raising=False)
        Watched(engine, gpu, kind(gpu), patch)
        engine.fresh(schedule.layers, schedule.chunk, 0, schedule.batches if use_v2 else 1)
        engine.scheduler._pdmux_policy = Groups(seed, schedule.layers)
        fuse_now_and_then(engine.scheduler, schedule.fused)
        test_async.check_schedule(engine, schedule, lambda: None)
        return gpu.races


@pytest.mark.parametrize("use_v2", [False, True], ids=["V1", "V2"])
@test_async.random_schedules
@given(schedule=test_async.some_schedule(), seed=st.integers(0, 10**6))
def test_no_layer_touches_kv_that_another_stream_may_still_touch(engines, use_v2, schedule, seed):
    assert not races(engines, use_v2, schedule, seed)


class NoOrder(Device):
    """A batch begins at once."""

    def begin(self, after):
        self._entered = None


class NoDrop(Device):
    """What comes after a batch that was dropped does not wait for its layers."""

    def drop(self): ...


class TooEarly(Device):
    """A batch waits for all but the last step before its admission."""

    _last = None

    def moment(self):
        moment, self._last = self._last, super().moment()
        return moment or self._last


class NoOrderOfGroups(Device):
    """The stream of a new group does not wait for the one before."""

    def use(self, group, runner):
        self._stream = self._prefill_streams[min(group, self._last_group)]
        super().use(group, runner)


@pytest.mark.parametrize("kind", [NoOrder, NoDrop, TooEarly, NoOrderOfGroups])
def test_a_device_that_orders_too_little_is_found(engines, kind):
    found = []

    @test_async.random_schedules
    @given(schedule=test_async.some_schedule(), seed=st.integers(0, 10**6))
    def search(schedule, seed):
        if not found:
            found.extend(races(engines, True, schedule, seed, kind))

    search()
    assert found
