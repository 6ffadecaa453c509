# SPDX-License-Identifier: Apache-2.0
"""A record of engine steps: which layers of which batch ran beside which decode step. Kept, and written to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pdmux.messages import LaneReport, PrefillOrder, Run
from vllm_pdmux.metrics.counters import kind_of
from vllm_pdmux.step_times import StepTime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class StepRecord:
    """One engine step, as the scheduler saw it when its output came back. Seconds are those of time.perf_counter()."""

    start_s: float  # when it was scheduled, or when the step before it came back if that was later
    done_s: float
    kind: str  # decode, prefill, fused or beside, as in the metrics
    group: int  # of the order: what both lanes had of the device
    decode_batch: int  # requests in the decode lane's step (of a fused step: all requests)
    decode_tokens: int
    batch_id: int | None  # the batch that the prefill lane was told to advance
    first_layer: int  # layers [first_layer, end_layer) of the batch ran in this step
    end_layer: int
    runs: tuple[Run, ...]  # of all batches that were run
    started: tuple[str, ...]  # the requests of the batch that this step began
    prefill_tokens: int  # of that batch, else 0
    ended_batch_id: int | None  # the batch that has ended in this step
    error: str | None  # what it raised
    drop: int | None  # no batch up to this one runs any more

    @property
    def batch_ended(self) -> bool:
        return self.ended_batch_id is not None


class StepTrace:
    """The last `limit` steps; each goes to all `sinks` too. With a limit of 0 and no sink nothing is computed."""

    def __init__(self, limit: int, sinks: Sequence[Callable[[StepRecord], None]] = ()):
        self._steps: deque[StepRecord] | None = deque(maxlen=limit) if limit > 0 else None
        self._sinks = tuple(sinks)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Oldest first."""
        return tuple(self._steps or ())

    def clear(self) -> None:
        if self._steps is not None:
            self._steps.clear()

    def record(self, output: SchedulerOutput, took: StepTime, order: PrefillOrder, report: LaneReport | None) -> None:
        """Keep the step whose `output`, order and report these are."""
        if self._steps is None and not self._sinks:
            return
        first_layer, end_layer = report.layers if report is not None else (0, 0)
        ended = report is not None and report.ended
        record = StepRecord(
            start_s=took.start_s,
            done_s=took.end_s,
            kind=kind_of(output, report),
            group=order.group,
            decode_batch=len(output.num_scheduled_tokens),
            decode_tokens=output.total_num_scheduled_tokens,
            batch_id=order.batch_id,
            first_layer=first_layer,
            end_layer=end_layer,
            runs=report.runs if report is not None else (),
            started=tuple(order.start.num_scheduled_tokens) if order.start is not None else (),
            prefill_tokens=order.start.total_num_scheduled_tokens if order.start is not None else 0,
            ended_batch_id=report.batch_id if report is not None and ended else None,
            error=report.error if report is not None else None,
            drop=order.abandoned,
        )
        if self._steps is not None:
            self._steps.append(record)
        for sink in self._sinks:
            sink(record)
