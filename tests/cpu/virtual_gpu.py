# SPDX-License-Identifier: Apache-2.0
"""A GPU without a GPU: streams that keep virtual time, runners that take it, and an executor that waits for it.

The real `CudaDevice` runs on it. What is launched on a stream ends some virtual milliseconds after what it is ordered
behind; the host's clock goes on where it launches, and where it waits for an output. So whether a batch ends before or
after a decode step, and how far ahead of the GPU the host is, follows from durations alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

from stand_ins import StandInExecutor, StandInRunnerV1, StandInRunnerV2, StandInWorker
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_pdmux.worker.lane_device import CudaDevice, HostDevice
from vllm_pdmux.worker.worker import PDMuxWorkerMixin, ReportingOutput


class Fault(Exception):
    """What a schedule has raised."""


class VirtualGpu:
    """The clock of a schedule, and the streams.

    `decode_ms`, `layer_ms`: what decode steps and layers of prompts take, in turn. `host_ms`: what a launch takes.
    `is_read_early`: outputs are read by a thread of their own as soon as they are there, not when the engine asks.
    """

    device = 0  # of a stream

    def __init__(self, decode_ms: Sequence[float], layer_ms: Sequence[float], host_ms: float, is_read_early: bool):
        self.now_s = 1000.0
        self._decode_ms, self._layer_ms = itertools.cycle(decode_ms), itertools.cycle(layer_ms)
        self._host_s, self._is_read_early = host_ms / 1e3, is_read_early
        self.decode = Stream(self)
        self.waits_of_decode = 0  # for another stream
        self._current = threading.local()
        self._unread: deque[AsyncOutputFuture] = deque()
        self.cuda = SimpleNamespace(
            Event=lambda: Event(self), set_device=lambda device: None, set_stream=self._set_stream, Stream=Stream
        )

    def clock_s(self) -> float:
        return self.now_s

    def wait_until(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def _set_stream(self, stream: Stream) -> None:
        self._current.stream = stream

    @property
    def current(self) -> Stream:
        """Of this thread."""
        return getattr(self._current, "stream", self.decode)

    def launch(self, is_decode: bool) -> None:
        """A decode step, or a layer of prompts."""
        self.now_s += self._host_s
        self.current.run(next(self._decode_ms if is_decode else self._layer_ms) / 1e3)
        self.read_what_is_there()

    def will_be_read(self, future: AsyncOutputFuture) -> None:
        if self._is_read_early:
            self._unread.append(future)

    def read_what_is_there(self) -> None:
        """What the thread that reads outputs has done by now."""
        while self._unread and ends_s(self._unread[0].async_output) <= self.now_s:
            with suppress(Fault):  # it is raised where the engine asks
                self._unread.popleft().result()


class Stream:
    """What is on it has ended at `end_s`."""

    device = 0

    def __init__(self, gpu: VirtualGpu):
        self._gpu, self.end_s = gpu, 0.0

    def run(self, duration_s: float) -> None:
        self.end_s = max(self.end_s, self._gpu.now_s) + duration_s

    def wait_event(self, event: Event) -> None:
        self.end_s = max(self.end_s, event.end_s)

    def wait_stream(self, other: Stream) -> None:
        self._gpu.waits_of_decode += self is self._gpu.decode
        self.end_s = max(self.end_s, other.end_s)


class Event:
    def __init__(self, gpu: VirtualGpu):
        self._gpu, self.end_s = gpu, 0.0

    def record(self, stream: Stream) -> None:
        self.end_s = stream.end_s

    def query(self) -> bool:
        return self.end_s <= self._gpu.now_s


class TimedOutput(AsyncModelRunnerOutput):
    """A step's output that is there when its stream has come so far."""

    def __init__(self, output, gpu: VirtualGpu, stream: Stream, check: Callable[[], None]):
        self._output, self._gpu, self._check = output, gpu, check
        self.async_copy_ready_event = Event(gpu)
        self.async_copy_ready_event.record(stream)

    @property
    def end_s(self) -> float:
        return self.async_copy_ready_event.end_s

    def get_output(self):
        self._gpu.wait_until(self.end_s)
        self._check()
        return self._output

    def get_kv_connector_output(self) -> None: ...


def ends_s(output: AsyncModelRunnerOutput) -> float:
    """When an output can be read without waiting."""
    if not isinstance(output, ReportingOutput):
        return output.end_s
    awaited = output._report._awaited
    waits_for = [output._output] if awaited is None else [output._output, awaited.output]
    return max(getattr(one, "end_s", 0.0) for one in waits_for)


class Timed:
    """A stand-in runner whose work takes time, and raises where the schedule says so. Its `device` is the GPU."""

    is_decode = False
    faults: dict[int, int | str]  # by the number of the prompts' forward pass: a layer, "sample" or "output"
    batches = -1  # number of the last forward pass

    def at_layer(self, layer, inputs):
        if self.is_decode:
            return
        self.batches += layer == 0
        self.device.launch(is_decode=False)
        self._raise_if(layer, self.batches, list(inputs))

    def _raise_if(self, place, batch, req_ids):
        if not self.is_decode and self.faults.get(batch) == place:
            self.failed.append(req_ids)
            raise Fault(f"at {place} of batch {batch}")

    def execute_model(self, output):
        result = super().execute_model(output)
        # A V1 runner keeps what it knows of preempted requests elsewhere.
        rows = self.requests if self.vllm_config.use_v2_model_runner else self.input_batch.rows
        assert len(rows) <= self.vllm_config.scheduler_config.max_num_seqs, "a runner has no row left"
        return result

    def sample_tokens(self, grammar_output):
        if self.is_decode:
            self.device.launch(is_decode=True)
        stream, batch, req_ids = self.device.current, self.batches, list(self.execute_model_state)
        self._raise_if("sample", batch, req_ids)
        output = super().sample_tokens(grammar_output)
        if not self.is_read_later:
            self.device.wait_until(stream.end_s)
            return output
        return TimedOutput(output._output, self.device, stream, partial(self._raise_if, "output", batch, req_ids))


class TimedRunnerV1(Timed, StandInRunnerV1):
    pass


class TimedRunnerV2(Timed, StandInRunnerV2):
    pass


class TimedWorker(StandInWorker):
    def __init__(self, vllm_config, gpu: VirtualGpu, use_device: bool, faults: dict[int, int | str]):
        super().__init__(vllm_config)
        self.gpu, self._use_device = gpu, use_device
        runner = TimedRunnerV2 if vllm_config.use_v2_model_runner else TimedRunnerV1
        runner.faults, runner.failed = faults, []  # of both runners
        self.model_runner = runner(vllm_config, gpu)
        self.model_runner.is_decode = True

    def _lane_device(self):
        if not self._use_device:
            return HostDevice()
        streams = [Stream(self.gpu) for _ in range(GROUPS - 1)]
        return CudaDevice(self.gpu.decode, dict(enumerate([self.gpu.decode, *streams])), self.gpu.clock_s)


GROUPS = 4  # fewer than the scheduler counts, as a device may have


class TimedPDMuxWorker(PDMuxWorkerMixin, TimedWorker):
    """The real mixin over the stand-in."""

    _lane_device = TimedWorker._lane_device  # not the mixin's own, which is a CPU's


class TimedExecutor(StandInExecutor):
    """Of the worker that a schedule has."""

    def _init_executor(self):
        self.driver_worker = StandInWorker(self.vllm_config)  # for the engine's start

    def collective_rpc(self, *args, **kwargs):
        worker = self.driver_worker
        if isinstance(worker, TimedWorker):
            worker.gpu.now_s += worker.gpu._host_s
            worker.gpu.read_what_is_there()
        result = super().collective_rpc(*args, **kwargs)
        if isinstance(result, AsyncOutputFuture):
            worker.gpu.will_be_read(result)
        return result
