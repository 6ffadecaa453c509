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
ERROR_LIMITS = (0.3, 3.0)


class FusedSteps:
    """Times in ms. `floor`, `decode`: as above, in times of a decode step alone; None where they were not measured.

    `rate`: prefill work per ms on the whole device.
    """

    def __init__(self, floor: float | None = None, decode: float | None = None):
        self._floor = FLOOR if floor is None else floor
        self._decode = DECODE if decode is None else decode
        self._error = Average(1.0, weight=PRIOR_STEPS)  # measured over expected time
        self.tail = Tail()

    def work(self, step_ms: float, alone_ms: float, rate: float) -> float:
        """The prefill work of a step that usually takes `step_ms`; 0: none fits."""
        work = (step_ms / self._error.value - self._decode * alone_ms) * rate
        return work if step_ms >= self._floor * alone_ms and work > 0 else 0.0

    def learn(self, step_ms: float, work: float, alone_ms: float, rate: float) -> None:
        """From a step of `work`."""
        by_work_ms, floor_ms = self._decode * alone_ms + work / rate, self._floor * alone_ms
        expected_ms = max(by_work_ms, floor_ms)
        if by_work_ms < floor_ms and step_ms < expected_ms * self._error.value:
            return  # the last chunk of a prompt is short: that it takes less says nothing of a long one
        self.tail.see(step_ms, expected_ms * self._error.value)
        low, high = ERROR_LIMITS
        self._error.add(min(max(step_ms / expected_ms, low), high))
