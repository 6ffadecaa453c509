# SPDX-License-Identifier: Apache-2.0
"""How long engine steps take, for all that is told of them: policies that learn, metrics, traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_pdmux.messages import LaneReport

_SCHEDULED_S = "pdmux_scheduled_s"


@dataclass(frozen=True)
class StepTime:
    """When a step ran, in seconds of the clock."""

    start_s: float
    end_s: float

    @property
    def ms(self) -> float:
        return (self.end_s - self.start_s) * 1e3


class StepTimes:
    """A step takes from when it was scheduled, or from when the step before it came back if that was later: under
    asynchronous scheduling steps queue up, and with nothing to do there is time between them.

    A step with nothing in it takes no time: it comes back when the host looks for it, which may be after it has
    launched the next one.
    """

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter):
        self._clock_s = clock_s
        self._last_s = clock_s()

    def scheduled(self, output: SchedulerOutput) -> None:
        """Note when the step `output` was scheduled."""
        setattr(output, _SCHEDULED_S, self._clock_s())

    def now(self) -> StepTime:
        """A moment."""
        now_s = self._clock_s()
        return StepTime(now_s, now_s)

    def done(self, output: SchedulerOutput, report: LaneReport | None) -> StepTime | None:
        """The step `output` has come back. None: neither lane had anything to do in it."""
        if not output.num_scheduled_tokens and (report is None or not (report.runs or report.ended)):
            return None
        end_s, last_s = self._clock_s(), self._last_s
        self._last_s = end_s
        return StepTime(max(getattr(output, _SCHEDULED_S, last_s), last_s), end_s)
