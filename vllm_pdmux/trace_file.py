# SPDX-License-Identifier: Apache-2.0
"""Writes engine steps to a file that Perfetto and chrome://tracing show: both lanes, and each batch from end to end.

The format is the JSON array of Chrome's trace events. A file without its end, as of a process that was killed, is read
by both too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_pdmux.trace import StepRecord

MOST_BYTES = 1 << 30
FLUSH_S = 1.0  # what a process that is killed loses, at most
SHOWN_REQUESTS = 8  # ids of a batch
PID, DECODE_TID, PREFILL_TID = 1, 1, 2


class TraceFileError(OSError):
    """The file cannot be written; the message names it, the reason and the way out."""


def path_of_engine(path: Path, engine: int) -> Path:
    """The file of one of several engines (data parallelism): the first has `path`, and steps.json of the second is
    steps.engine1.json. A device is for all of them, and what can be no file is left for TraceFile to name."""
    if engine == 0 or (path.exists() and not path.is_file()):
        return path
    return path.with_name(f"{path.stem}.engine{engine}{path.suffix}")


class TraceFile:
    """`log` is told, once, why it has stopped: the disk is full, or `most_bytes` are written.

    Raises TraceFileError when the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        log: Callable[[str], None],
        most_bytes: int = MOST_BYTES,
        clock_s: Callable[[], float] = time.perf_counter,
    ):
        self._path, self._log, self._left_bytes, self._clock_s = path, log, most_bytes, clock_s
        self._start_s = self._flushed_s = clock_s()
        self._in_lane: set[int] = set()
        self._has_given_up = False
        try:
            self._file: Any = path.open("w", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise TraceFileError(
                f"trace_file is {path} but cannot be written ({reason}): name a file in a folder that exists "
                "and that you may write to"
            ) from None
        self._separator = "[\n"
        self._write({"ph": "M", "name": "process_name", "args": {"name": "vllm_pdmux"}})
        for tid, name in ((DECODE_TID, "decode lane"), (PREFILL_TID, "prefill lane: layers launched")):
            self._write({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})

    def add(self, step: StepRecord) -> None:
        """A step, the layers and batches of it."""
        if self._file is None:
            return
        start_us = self._us(step.start_s)
        span = {"ph": "X", "ts": start_us, "dur": max(self._us(step.done_s) - start_us, 0.001)}
        name = f"{step.kind}, {step.decode_batch} requests" if step.decode_batch else step.kind
        self._write({**span, "name": name, "tid": DECODE_TID, "args": self._details(step)})
        if step.drop is not None:
            self._end([batch_id for batch_id in sorted(self._in_lane) if batch_id <= step.drop], start_us, "dropped")
        if step.started and step.batch_id is not None:
            self._in_lane.add(step.batch_id)
            shown = {"tokens": step.prefill_tokens, "requests": list(step.started[:SHOWN_REQUESTS])}
            self._batch("b", step.batch_id, start_us, {**shown, "and_more": len(step.started[SHOWN_REQUESTS:])})
        for run in step.runs:
            layers = f"batch {run.batch_id}, layers {run.first_layer} to {run.end_layer - 1}"
            if run.end_layer > run.first_layer:
                self._write({**span, "name": layers, "tid": PREFILL_TID})
        if step.ended_batch_id is not None:
            self._end([step.ended_batch_id], self._us(step.done_s), step.error or "ended")
        self._write({"ph": "C", "name": "decode batch", "ts": start_us, "args": {"requests": step.decode_batch}})
        self._write({"ph": "C", "name": "batches in lane", "ts": start_us, "args": {"batches": len(self._in_lane)}})
        self._flush()

    def close(self) -> None:
        """Make the file whole."""
        if self._file is not None:
            self._guarded(lambda: self._file.write("\n]\n"))
            self._stop()

    def _details(self, step: StepRecord) -> dict[str, Any]:
        return {"group": step.group, "requests": step.decode_batch, "tokens": step.decode_tokens}

    def _end(self, batch_ids: list[int], at_us: float, result: str) -> None:
        for batch_id in batch_ids:
            self._in_lane.discard(batch_id)
            self._batch("e", batch_id, at_us, {"result": result})

    def _batch(self, phase: str, batch_id: int, at_us: float, args: dict[str, Any]) -> None:
        name = f"batch {batch_id}"
        self._write({"ph": phase, "cat": "batch", "id": batch_id, "name": name, "ts": at_us, "args": args})

    def _us(self, at_s: float) -> float:
        return round((at_s - self._start_s) * 1e6, 3)

    def _write(self, event: dict[str, Any]) -> None:
        text = self._separator + json.dumps({"pid": PID, "tid": DECODE_TID, **event})
        self._separator = ",\n"
        self._left_bytes -= len(text)
        if self._left_bytes < 0:
            self._give_up("it is as large as it may become; start the engine again for another one")
        elif self._file is not None:
            self._guarded(lambda: self._file.write(text))

    def _flush(self) -> None:
        now_s = self._clock_s()
        if self._file is not None and now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self._guarded(self._file.flush)

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            self._give_up(f"{error.strerror}: free the disk or name another file")

    def _give_up(self, reason: str) -> None:
        """The engine goes on without it."""
        if self._file is not None:
            self._has_given_up = True
            self._log(f"trace_file {self._path} ends here: {reason}")
            self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return  # writing its end has failed
        try:
            file.close()
        except OSError as error:
            if not self._has_given_up:
                self._log(f"trace_file {self._path} has lost its end: {error.strerror}: free the disk")
