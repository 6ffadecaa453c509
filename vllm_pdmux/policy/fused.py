# SPDX-License-Identifier: Apache-2.0
"""What a policy believes of fused steps, in which stock vLLM prefills and decodes in one batch."""

from __future__ import annotations

from vllm_pdmux.policy.estimates import Average
from vllm_pdmux.policy.tail import Tail

# Without a calibration. A fused step takes what decode takes alone, and the time of its prompt tokens on the whole
# device, but never less than a floor; H200, 8B, four loads: 0.75 to 1.08 times, and 1.4 to 1.6 times decode alone.
FLOOR = 1.5
DECODE = 1.0
PRIOR_STEPS = 5
ERROR_LIMITS, FLOOR_LIMITS = (0.3, 3.0), (1.0, 4.0)
# Steps that were slow once make fused steps small or none at all, so that nothing would ever show that they are not
# slow any more: after so many questions that were answered with none, a little of it is forgotten.
QUESTIONS_UNTIL_DOUBT = 50


class FusedSteps:
    """Times in ms. `floor`, `decode`: as above, in times of a decode step alone; None where they were not measured.

    `rate`: prefill work per ms on the whole device. A step is either as short as the floor, whatever its work, or as
    long as its work makes it; what is learned of one kind says nothing of the other.
    """

    def __init__(self, floor: float | None = None, decode: float | None = None):
        self._floor = Average(FLOOR if floor is None else floor, PRIOR_STEPS, is_seen=True)
        self._decode = DECODE if decode is None else decode
        self._error = Average(1.0, PRIOR_STEPS, is_seen=True)  # measured over expected time of steps above the floor
        self._questions = 0
        self.tail = Tail()

    def work(self, step_ms: float, alone_ms: float, rate: float) -> float:
        """The prefill work of a step that usually takes `step_ms`; 0: none fits."""
        work = (step_ms / self._error.value - self._decode * alone_ms) * rate
        if step_ms >= self._floor.value * alone_ms and work > 0:
            self._questions = 0
            return work
        self._questions += 1
        if self._questions % QUESTIONS_UNTIL_DOUBT == 0:
            self._doubt()
        return 0.0

    def learn(self, step_ms: float, work: float, alone_ms: float, rate: float) -> None:
        """From a step of `work`."""
        by_work_ms, floor_ms = self._decode * alone_ms + work / rate, self._floor.value * alone_ms
        if by_work_ms < floor_ms:
            self._floor.add(_within(step_ms / alone_ms, FLOOR_LIMITS))
            self._doubt()  # steps may be so short because a long one was slow
            return
        self.tail.see(step_ms, by_work_ms * self._error.value)
        self._error.add(_within(step_ms / by_work_ms, ERROR_LIMITS))

    def _doubt(self) -> None:
        if self._error.value > 1.0:
            self._error.add(1.0)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
