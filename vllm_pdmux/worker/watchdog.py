# SPDX-License-Identifier: Apache-2.0
"""Notices when the prefill lane has work and makes no progress, and says what every thread was doing.

It looks on from a thread of its own, since whatever hangs would not call it: the host in a layer, the device in a
kernel, or an engine that has stopped stepping. It changes nothing in the lane: with the action FAIL it tells the lane
to give up, which the engine's next step does. Layers that have been launched cannot be taken back from a device that
does not answer, so their KV blocks are nobody else's while they may still run.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger("vllm.pdmux.watchdog")

THREAD = "pdmux-watchdog"
LOG, FAIL, EXIT = ACTIONS = ("log", "fail", "exit")
EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h
LOOKS = 4  # in the time after which it acts
SHORTEST_WAIT_S, LONGEST_END_S = 0.01, 10.0


class Watchdog:
    """`progress` is None while the lane has nothing to do, else something that differs when it has come further.

    After `limit_s` seconds without a difference `describe` and the stacks of all threads go to the log, once for each
    stall. With the action EXIT the process then ends with EXIT_STALLED. With FAIL `give_up` is called with what
    `progress` said and the seconds, and the process ends where there is still no difference after as long again: then
    no step has come that could have given up. All are called on the watchdog's thread, `bind` once before the others.
    """

    def __init__(
        self,
        limit_s: float,
        action: str,
        progress: Callable[[], object],
        describe: Callable[[], str],
        give_up: Callable[[object, float], object],
        clock_s: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
        bind: Callable[[], object] = lambda: None,
    ):
        self._limit_s, self._action = limit_s, action
        self._progress, self._describe, self._give_up = progress, describe, give_up
        self._clock_s, self._end, self._bind = clock_s, end, bind
        self._wait_s = min(max(limit_s / LOOKS, SHORTEST_WAIT_S), threading.TIMEOUT_MAX)
        self._last: object = None
        self._looked_s = clock_s()
        self._stalled_s = 0.0
        self._has_said = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look on until `close`."""
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(LONGEST_END_S)  # it may be in a call that does not return

    def look(self) -> None:
        """Once. Acts when there has been no progress for too long."""
        progress, now_s = self._progress(), self._clock_s()
        # Where the process itself was stopped it has not looked either, and the lane could not go on.
        since_s, self._looked_s = min(now_s - self._looked_s, 2 * self._wait_s), now_s
        if progress is None or progress != self._last:
            self._last, self._stalled_s, self._has_said = progress, 0.0, False
            return
        self._stalled_s += since_s
        if not self._has_said and self._stalled_s >= self._limit_s:
            self._has_said = True
            self._act(progress)
        elif self._action == FAIL and self._stalled_s >= 2 * self._limit_s:
            self._exit(
                f"no step has come since in which the prefill lane could give up, as watchdog_action {FAIL} asks"
            )

    def _run(self) -> None:
        self._bind()
        while not self._closed.wait(self._wait_s):
            try:
                self.look()
            except Exception:  # what looks on must not end with what it looks at
                logger.exception("PD-multiplexing: the watchdog could not look at the prefill lane")

    def _act(self, progress: object) -> None:
        try:
            logger.error(
                "PD-multiplexing: the prefill lane has made no progress for %.0f s (watchdog_s is %g): %s\n%s",
                self._stalled_s,
                self._limit_s,
                self._described(),
                stacks(),
            )
        finally:
            if self._action == EXIT:
                self._exit(f"watchdog_action is {EXIT}")
            elif self._action == FAIL:
                self._give_up(progress, self._stalled_s)

    def _exit(self, why: str) -> None:
        logger.error("PD-multiplexing: the process ends, as %s", why)
        for handler in logging.getLogger("vllm").handlers:
            handler.flush()
        self._end(EXIT_STALLED)

    def _described(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # noqa: BLE001 - it is read while others change it; the stacks are worth more
            return f"what it does could not be read ({type(error).__name__}: {error})"


def stacks() -> str:
    """The stack of every thread but the one that asks, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = threading.get_ident()
    found = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != me
    ]
    return "\n".join(found)
