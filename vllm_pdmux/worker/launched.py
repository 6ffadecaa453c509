# SPDX-License-Identifier: Apache-2.0
"""Batches whose layers have all been launched, until the report of a step says that they have ended.

The worker's thread launches a step while the one before it runs on the device. So what has ended is looked at where a
step's own output is waited for, a step or two later, which may be on another thread: the first token of a prompt comes
with the step during which its batch has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_pdmux.messages import LaneReport


@dataclass(frozen=True)
class Batch:
    """A prefill batch in the lane."""

    id: int
    output: SchedulerOutput
    grammar: GrammarOutput | None
    after: Any  # what it must be ordered behind: a moment of the device

    @property
    def req_ids(self) -> list[str]:
        return list(self.output.num_scheduled_tokens)


class Launched(NamedTuple):
    """A batch that the host is done with: its result, which the device may have yet to make, or what it raised."""

    batch: Batch
    step: int  # in which its last layer was launched
    output: Any
    error: str | None


class LaunchedBatches:
    """In order. `is_done` says whether an output can be read without waiting.

    Of several ranks one is asked for its outputs. On the others nothing is taken: there the scheduler's word that a
    batch has left the lane, which `drop` passes on, is the first that is heard of it.
    """

    def __init__(self, is_done: Callable[[Any], bool]):
        self._is_done = is_done
        self._batches: list[Launched] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._batches)

    def all(self) -> list[Launched]:
        """Those that no step has reported yet."""
        with self._lock:
            return list(self._batches)

    def ids(self) -> tuple[int, ...]:
        """The same, without waiting for whoever is asking the device about them."""
        return tuple(one.batch.id for one in tuple(self._batches))

    def add(self, launched: Launched) -> None:
        """From the worker's thread."""
        with self._lock:
            self._batches.append(launched)

    def drop(self, last_id: int) -> None:
        """Forget all up to this batch."""
        with self._lock:
            self._batches = [one for one in self._batches if one.batch.id > last_id]

    def take(self, step: int, awaited: Launched | None) -> Launched | None:
        """The first batch if it has ended, or if it is `awaited`, which need not have: then for `step` to report.

        Not one whose last layer was launched later, since the scheduler would learn of its end before its layers.
        """
        with self._lock:
            if not self._batches or (first := self._batches[0]).step > step:
                return None
            if first is not awaited and first.error is None and not self._is_done(first.output):
                return None
            return self._batches.pop(0)


class PendingReport:
    """The report of a step, which becomes whole when the step's own output is there."""

    def __init__(self, report: LaneReport, step: int, awaited: Launched | None, launched: LaunchedBatches):
        self._report, self._step = report, step
        self._awaited, self._launched = awaited, launched

    def whole(self, **changes: Any) -> LaneReport:
        """With the first batch that has ended by now. On any thread, once, the steps in order."""
        if (ended := self._launched.take(self._step, self._awaited)) is None:
            return replace(self._report, **changes)
        return replace(self._report, batch_id=ended.batch.id, output=ended.output, error=ended.error, **changes)
