# SPDX-License-Identifier: Apache-2.0
"""A lane runs one job and can be stopped at the layer boundaries of the job and continued later.

`ThreadedLane` keeps the job on a thread of its own and hands control to and fro: exactly one of the two threads runs
at any time, so the job needs no locks. `SerialLane` runs the whole job at its first advance; it is the oracle of the
tests and the setting ``lane: serial``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

_UNFINISHED = object()


class Dropped(BaseException):
    """Raised inside a job that is abandoned; a BaseException so that no handler of the job keeps it."""


class Lane(Protocol):
    """One job at a time: `start`, then `advance` until it returns True, then `take`."""

    layer: int  # layers of the current job that have begun

    def start(self, job: Callable[[], Any]) -> None: ...

    def advance(self, layers: int) -> bool: ...

    def take(self) -> Any: ...

    def drop(self) -> None: ...

    def at_layer(self) -> None: ...

    def close(self) -> None: ...


class SerialLane:
    """No second thread: the first advance runs the whole job."""

    def __init__(self) -> None:
        self.layer = 0
        self._job: Callable[[], Any] | None = None
        self._running = False

    def start(self, job: Callable[[], Any]) -> None:
        assert self._job is None, "the lane has a job already"
        self._job, self.layer = job, 0

    def advance(self, layers: int) -> bool:
        return True

    def take(self) -> Any:
        job, self._job = self._job, None
        assert job is not None, "the lane has no job"
        self._running = True
        try:
            return job()
        finally:
            self._running = False

    def drop(self) -> None:
        self._job = None

    def at_layer(self) -> None:
        self.layer += self._running

    def close(self) -> None:
        self._job = None


class ThreadedLane:
    """The job runs on one thread, which is created with the first job.

    With `keep_thread` it serves all later jobs too. Without, it ends with its job: on a CPU a second thread that has
    run OpenMP regions has a team of workers of its own, and libgomp spins less while there are more workers than cores,
    so that decode steps alone would stay slower (measured: 48 instead of 28 ms on two cores).

    `switch_in` and `switch_out` are called around every stretch of the job, on the thread that gives control away, and
    exchange what is global in the process (see `worker.process_state`).
    """

    def __init__(self, switch_in: Callable[[], None], switch_out: Callable[[], None], keep_thread: bool):
        self.layer = 0
        self._switch_in = switch_in
        self._switch_out = switch_out
        self._keep_thread = keep_thread
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)  # released by the engine's thread: the job may run
        self._back = threading.Event()  # set by the lane's thread: the job stopped or ended
        self._job: Callable[[], Any] | None = None
        self._stop_before = 0  # the layer before which the job stops next
        self._dropping = False
        self._closing = False
        self._result: Any = _UNFINISHED
        self._error: BaseException | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Give the lane a job; nothing of it runs before the first `advance`."""
        assert self._job is None, "the lane has a job already"
        self._job, self.layer, self._stop_before = job, 0, 0
        self._result, self._error, self._dropping = _UNFINISHED, None, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="pdmux-prefill", daemon=True)
            self._thread.start()

    def advance(self, layers: int) -> bool:
        """Run `layers` more layers of the job; True when it has ended. What it raised comes out of `take`."""
        assert self._job is not None, "the lane has no job"
        if layers <= 0:
            return self.ended
        self._stop_before = self.layer + layers
        self._run_until_back()
        return self.ended

    @property
    def ended(self) -> bool:
        return self._result is not _UNFINISHED or self._error is not None

    def take(self) -> Any:
        """The result of the job that has ended, or what it raised."""
        assert self.ended, "the job has not ended"
        result, error = self._result, self._error
        self._leave()
        if error is not None:
            raise error
        return result

    def drop(self) -> None:
        """Abandon the job: its stack unwinds from the layer where it stands, and nothing more of it runs."""
        if self._job is None:
            return
        if not self.ended and self.layer > 0:
            self._dropping = True
            self._run_until_back()
        self._leave()

    def at_layer(self) -> None:
        """Called where a layer begins. Stops there when the job has run the layers it was allowed."""
        if threading.current_thread() is not self._thread:
            return  # another user of the same layers: a warm-up, or the serial path
        if self.layer == self._stop_before:
            self._back.set()
            self._go.acquire()
            if self._dropping:
                raise Dropped
        self.layer += 1

    def close(self) -> None:
        """End the thread; a job in progress is abandoned."""
        self.drop()
        self._end_thread()

    def _leave(self) -> None:
        # The lane must not keep a batch's tensors alive.
        self._job, self._result, self._error = None, _UNFINISHED, None
        if not self._keep_thread:
            self._end_thread()

    def _end_thread(self) -> None:
        if self._thread is None:
            return
        self._closing = True
        self._go.release()
        self._thread.join()
        self._thread, self._closing = None, False

    def _run_until_back(self) -> None:
        self._back.clear()
        self._switch_in()
        self._go.release()
        try:
            self._back.wait()
        except BaseException:
            # A signal's handler raised, as vLLM's do. Nothing may be done to a job that still runs: first it stops.
            self._back.wait()
            raise
        finally:
            self._switch_out()

    def _main(self) -> None:
        while True:
            self._go.acquire()
            if self._closing:
                return
            try:
                assert self._job is not None
                self._result = self._job()
            except BaseException as error:  # noqa: BLE001 - everything a job raises belongs to whoever takes it
                self._error = error
            self._back.set()
