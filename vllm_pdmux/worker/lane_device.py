# SPDX-License-Identifier: Apache-2.0
"""Where the lane's work runs, and how much of it may be queued."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

# Layers queued ahead of the GPU: as many as it begins in a step, and MARGIN.
FIRST_LEAD, MARGIN, LONGEST_LEAD = 2, 2, 16
# The host launches layers between two decode steps. It spends no more than this share of a step on them, or decode
# would wait for it where layers are so short that their launch takes as long as they do.
HOST_SHARE = 0.5


class Moment(Protocol):
    """Of the device: as a CUDA event, on any thread."""

    def query(self) -> bool:
        """Whether it has come so far."""


class Passed:
    """A moment that is over."""

    def query(self) -> bool:
        return True


class LaneDevice(Protocol):
    """What the prefill lane asks of the device."""

    keep_thread: bool  # whether the lane's thread outlives its batch
    workspace: int  # vLLM's workspace lane, whose scratch the prefill lane uses

    @property
    def lead_layers(self) -> int:
        """How many layers it keeps queued, or has; 0: it has no queue."""

    def bind(self) -> None:
        """On another thread, before it looks at moments."""

    def use(self, group: int, runner: Any) -> None:
        """On the worker's thread: launch what comes next of `runner` on the SMs of `group`."""

    def moment(self) -> Any:
        """On the worker's thread: what the decode lane has queued up to now, for `begin`."""

    def begin(self, after: Any) -> None:
        """On the worker's thread, before a batch: order it behind the moment `after`."""

    def enter(self) -> None:
        """On the lane's thread, whenever the batch goes on: there it may find another stream."""

    def mark(self) -> None:
        """On the lane's thread, where a layer begins."""

    def stride(self, layers: int) -> int:
        """How many of `layers` layers to launch before asking `wants_more` again."""

    def wants_more(self) -> bool:
        """Whether more layers should be launched in this step."""

    def is_busy(self) -> bool:
        """Whether the device has layers of the lane to run, or runs the last of them."""

    def is_done(self, output: Any) -> bool:
        """Whether the result of a batch whose layers have all been launched can be read without waiting."""

    def drop(self) -> None:
        """Order what the decode lane does from now on behind the layers that are queued already."""

    def end(self) -> Moment:
        """The end of what the lane has queued up to now."""


class HostDevice:
    """A CPU: a layer has run when its launch returns."""

    keep_thread = False
    workspace = 0  # shared: what runs has ended when control changes
    lead_layers = 0

    def bind(self) -> None: ...

    def use(self, group: int, runner: Any) -> None: ...

    def moment(self) -> None: ...

    def begin(self, after: Any) -> None: ...

    def enter(self) -> None: ...

    def mark(self) -> None: ...

    def stride(self, layers: int) -> int:
        return layers

    def wants_more(self) -> bool:
        return True

    def is_busy(self) -> bool:
        return True

    def is_done(self, output: Any) -> bool:
        return True

    def drop(self) -> None: ...

    def end(self) -> Moment:
        return Passed()


class CudaDevice:
    """A GPU: layers are queued on the stream of a group, a little ahead of what has run.

    `prefill_streams`: by group. Group 0, where nothing decodes, may have the decode stream itself. The decode stream
    waits for another one where a batch is dropped, and where the lane moves onto it; nowhere else.

    A batch may change streams between two layers. Its tensors stay in the allocator's pool of the stream where they
    were allocated, and what is freed there is used again only by work that is queued later on that stream, which has
    then been ordered behind all streams that the lane used meanwhile.
    """

    keep_thread = True
    workspace = 1

    def __init__(
        self,
        decode_stream: torch.cuda.Stream,
        prefill_streams: Mapping[int, torch.cuda.Stream],
        clock_s: Callable[[], float] = time.perf_counter,
    ):
        self._decode_stream = decode_stream
        self._prefill_streams = prefill_streams
        self._last_group = max(prefill_streams)
        self._stream = prefill_streams[self._last_group]
        self._entered: torch.cuda.Stream | None = None  # the current stream of the lane's thread
        self._marks: deque[torch.cuda.Event] = deque()  # where layers begin that have not begun on the GPU
        self._free_events: list[torch.cuda.Event] = []
        self._clock_s = clock_s
        self._step_s = self._launch_until_s = clock_s()  # when this step's launches began, and when they must end
        self._taken_s = float("inf")  # between the launches of the two steps before
        self._lead = FIRST_LEAD
        self._begun = 0  # layers that have begun on the GPU since the step before
        self._launched = 0  # layers, in this step
        self._is_first = False  # whether a batch has begun of which no layer has
        self._is_short = False  # whether layers were left to launch when the lead was reached

    @property
    def lead_layers(self) -> int:
        return self._lead

    def bind(self) -> None:
        torch.cuda.set_device(self._decode_stream.device)  # else the first GPU, which may be another one

    def use(self, group: int, runner: Any) -> None:
        # A device may have fewer groups than the scheduler counts.
        stream = self._prefill_streams[min(group, self._last_group)]
        if stream is not self._stream:
            stream.wait_stream(self._stream)  # layers run in order, and so do batches
            self._stream = stream
        runner.__dict__["main_stream"] = stream  # else cached from the stream of the runner's first use
        self._set_lead()

    def _set_lead(self) -> None:
        """Once in a step: by what the GPU has begun since the last one."""
        is_dry = not self.is_busy()
        begun, self._begun = self._begun, 0
        if self._is_short and is_dry:
            # How many more it would have begun is not known.
            self._lead = min(self._lead + self._lead // 2, LONGEST_LEAD)
        elif not is_dry:
            needed = max(begun + MARGIN, FIRST_LEAD)
            self._lead = needed if needed > self._lead else self._lead - (self._lead > needed)
            self._lead = min(self._lead, LONGEST_LEAD)
        self._is_short, self._launched = False, 0
        now_s = self._clock_s()
        # Of the two last steps the shorter one: the lane may have had nothing to do for a long time.
        before_s, self._taken_s = self._taken_s, now_s - self._step_s
        self._launch_until_s = now_s + min(before_s, self._taken_s) * HOST_SHARE
        self._step_s = now_s

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._decode_stream)
        return event

    def begin(self, after: torch.cuda.Event) -> None:
        # Blocks that the batch writes may be read by decode steps that were queued when it was admitted; blocks that it
        # hits, written. Decode steps after that know nothing of its blocks.
        if self._stream is not self._decode_stream:
            self._stream.wait_event(after)
        self._entered = None  # whatever has run on the thread since
        self._is_first = True

    def enter(self) -> None:
        if self._entered is not self._stream:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)  # vLLM tracks the current stream through this call
            self._entered = self._stream

    def mark(self) -> None:
        event = self._free_events.pop() if self._free_events else torch.cuda.Event()
        event.record(self._stream)
        self._marks.append(event)
        self._launched += 1
        self._is_first = False

    def stride(self, layers: int) -> int:
        return 1

    def is_busy(self) -> bool:
        while self._marks and self._marks[0].query():
            self._free_events.append(self._marks.popleft())
            self._begun += 1
        return bool(self._marks)

    def wants_more(self) -> bool:
        self.is_busy()
        if self._is_first:  # a V1 runner knows a request from its batch's first layer on, even if it is dropped then
            return True
        self._is_short = len(self._marks) >= self._lead
        # One at least, however short the step before was: the lane goes on in every step.
        return not self._is_short and (self._launched == 0 or self._clock_s() < self._launch_until_s)

    def is_done(self, output: Any) -> bool:
        for name in ("copy_event", "async_copy_ready_event"):
            if hasattr(output, name):
                return bool(getattr(output, name).query())
        return True  # without asynchronous scheduling a V1 runner has waited for it

    def drop(self) -> None:
        if self._stream is not self._decode_stream:
            self._decode_stream.wait_stream(self._stream)

    def end(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class RankDevice(CudaDevice):
    """One of several GPUs. It launches what is ordered, as they all must launch the same; the pace is the scheduler's
    (see `pace`), which is told what is queued."""

    @property
    def lead_layers(self) -> int:
        return len(self._marks)

    def stride(self, layers: int) -> int:
        return layers

    def wants_more(self) -> bool:
        return True
