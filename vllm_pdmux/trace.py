# SPDX-License-Identifier: Apache-2.0
"""A record of the last engine steps: which layers of which batch ran beside which decode step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pdmux.messages import LaneReport, PrefillOrder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class StepRecord:
    """One engine step, as the scheduler saw it when its output came back."""

    done_s: float  # time.perf_counter() at the end of the step
    decode_batch: int  # requests in the decode lane's step (of a fused step: all requests)
    decode_tokens: int
    batch_id: int | None  # the batch that the prefill lane was told to advance
    first_layer: int  # layers [first_layer, end_layer) of the batch ran in this step
    end_layer: int
    prefill_tokens: int  # of the batch when this step began it, else 0
    batch_ended: bool


class StepTrace:
    """The last `limit` steps; with a limit of 0 nothing is kept and nothing computed."""

    def __init__(self, limit: int):
        self._steps: deque[StepRecord] | None = deque(maxlen=limit) if limit > 0 else None

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Oldest first."""
        return tuple(self._steps or ())

    def clear(self) -> None:
        if self._steps is not None:
            self._steps.clear()

    def record(self, output: SchedulerOutput, order: PrefillOrder | None, report: LaneReport | None) -> None:
        """Keep the step whose `output`, order and report these are."""
        if self._steps is None:
            return
        first_layer, end_layer = report.layers if report is not None else (0, 0)
        started = order.start if order is not None else None
        self._steps.append(
            StepRecord(
                done_s=time.perf_counter(),
                decode_batch=len(output.num_scheduled_tokens),
                decode_tokens=output.total_num_scheduled_tokens,
                batch_id=order.batch_id if order is not None else None,
                first_layer=first_layer,
                end_layer=end_layer,
                prefill_tokens=started.total_num_scheduled_tokens if started is not None else 0,
                batch_ended=report.ended if report is not None else False,
            )
        )
