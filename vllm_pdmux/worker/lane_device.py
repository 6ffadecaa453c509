# SPDX-License-Identifier: Apache-2.0
"""Where the lane's work runs, and how much of it may be queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import torch

# Layers queued ahead of the GPU. Two, so that one runs while the next is launched; more when the queue has run dry.
FIRST_LEAD, LONGEST_LEAD = 2, 12


class LaneDevice(Protocol):
    """What the prefill lane asks of the device."""

    keep_thread: bool  # whether the lane's thread outlives its batch

    def begin(self, group: int, runner: Any) -> None:
        """On the worker's thread, before a batch: choose its stream, behind what the decode lane has queued."""

    def enter(self) -> None:
        """On the lane's thread, when the batch starts to run."""

    def mark(self) -> None:
        """On the lane's thread, where a layer begins."""

    def stride(self, layers: int) -> int:
        """How many of `layers` layers to launch before asking `wants_more` again."""

    def wants_more(self) -> bool:
        """Whether more layers should be launched in this step."""

    def is_done(self, output: Any) -> bool:
        """Whether the result of a batch whose layers have all been launched can be read without waiting."""

    def drop(self) -> None:
        """Order what the decode lane does from now on behind the layers that are queued already."""


class HostDevice:
    """A CPU: a layer has run when its launch returns."""

    keep_thread = False

    def begin(self, group: int, runner: Any) -> None: ...

    def enter(self) -> None: ...

    def mark(self) -> None: ...

    def stride(self, layers: int) -> int:
        return layers

    def wants_more(self) -> bool:
        return True

    def is_done(self, output: Any) -> bool:
        return True

    def drop(self) -> None: ...


class CudaDevice:
    """A GPU: layers are queued on the stream of the batch's group, a little ahead of what has run.

    `prefill_streams`: by group. The decode stream never waits for one of them, but where a batch is dropped.
    """

    keep_thread = True

    def __init__(self, decode_stream: torch.cuda.Stream, prefill_streams: Mapping[int, torch.cuda.Stream]):
        self._decode_stream = decode_stream
        self._prefill_streams = prefill_streams
        self._stream = next(iter(prefill_streams.values()))
        self._marks: deque[torch.cuda.Event] = deque()  # where layers begin that have not begun on the GPU
        self._free_events: list[torch.cuda.Event] = []
        self._lead = FIRST_LEAD
        self._is_first = True

    def begin(self, group: int, runner: Any) -> None:
        # A batch that begins with nothing decoding (group 0) may meet a decoding request: it has the first mixed group.
        group = min(max(group, min(self._prefill_streams)), max(self._prefill_streams))
        before, self._stream = self._stream, self._prefill_streams[group]
        self._stream.wait_stream(before)  # batches go through the lane in order
        # Blocks that the batch writes may be read by decode steps that are queued; blocks that it hits, written.
        self._stream.wait_stream(self._decode_stream)
        runner.__dict__["main_stream"] = self._stream  # else cached from the stream of the runner's first use
        self._is_first = True

    def enter(self) -> None:
        torch.cuda.set_device(self._stream.device)
        torch.cuda.set_stream(self._stream)  # vLLM tracks the current stream through this call

    def mark(self) -> None:
        event = self._free_events.pop() if self._free_events else torch.cuda.Event()
        event.record(self._stream)
        self._marks.append(event)

    def stride(self, layers: int) -> int:
        return 1

    def wants_more(self) -> bool:
        while self._marks and self._marks[0].query():
            self._free_events.append(self._marks.popleft())
        if not self._marks and not self._is_first:
            self._lead = min(self._lead + 1, LONGEST_LEAD)
        self._is_first = False
        return len(self._marks) < self._lead

    def is_done(self, output: Any) -> bool:
        return output.copy_event.query()

    def drop(self) -> None:
        self._decode_stream.wait_stream(self._stream)
