# SPDX-License-Identifier: Apache-2.0
"""What a policy believes of fused steps, in which stock vLLM prefills and decodes in one batch."""

from __future__ import annotations

from vllm_pdmux.policy.estimates import Average
from vllm_pdmux.policy.prior import FusedPrior, Mix
from vllm_pdmux.policy.tail import Tail

# Without a calibration. A fused step takes what decode takes alone, and the time of its prompt tokens on the whole
# device, but never less than a floor; H200, 8B, four loads: 0.75 to 1.08 times, and 1.4 to 1.6 times decode alone.
FLOOR, SUM = 1.5, FusedPrior((1.0, 1.0, 1.0), 1.0)
CALIBRATED_FLOOR = 1.0
PRIOR_STEPS = 5
ERROR_LIMITS, FLOOR_LIMITS = (0.3, 3.0), (1.0, 4.0)
# Steps that were slow once make fused steps small or none at all, so that nothing would ever show that they are not
# slow any more: after so many questions that were answered with none, a little of it is forgotten.
QUESTIONS_UNTIL_DOUBT = 50


class FusedSteps:
    """Times in ms. `prior`: what was calibrated, if anything was. `graph_tokens`: see `SloPolicy`.

    `rate`: prefill work per ms on the whole device; `mix`: of the decode step, which alone takes `alone_ms`. A step is
    either as short as the floor, whatever its work, or as long as its work makes it; what is learned of one kind says
    nothing of the other.
    """

    def __init__(self, prior: FusedPrior | None = None, graph_tokens: int = 0):
        self.graph_tokens = graph_tokens
        self._floor = Average(CALIBRATED_FLOOR if prior else FLOOR, PRIOR_STEPS, is_seen=True)
        self._prior = prior or SUM
        self._error = Average(1.0, PRIOR_STEPS, is_seen=True)  # measured over expected time of steps above the floor
        self._questions = 0
        self.tail = Tail()

    def ms(self, work: float, alone_ms: float, mix: Mix, rate: float) -> float:
        """What a step of `work` usually takes."""
        by_work_ms = self._prior.ms(alone_ms, mix, work / rate) * self._error.value
        return max(by_work_ms, self._floor.value * alone_ms)

    def work(self, step_ms: float, alone_ms: float, mix: Mix, rate: float) -> float:
        """The prefill work of a step that usually takes `step_ms`; 0: none fits."""
        spare_ms = step_ms / self._error.value - self._prior.ms(alone_ms, mix, 0.0)
        work = spare_ms / self._prior.prompt * rate
        if step_ms >= self._floor.value * alone_ms and work > 0:
            self._questions = 0
            return work
        self._questions += 1
        if self._questions % QUESTIONS_UNTIL_DOUBT == 0:
            self._doubt()
        return 0.0

    def with_a_graph(self, tokens: int, decode_batch: int) -> int:
        """Prompt tokens of a step that has a CUDA graph, if one of `tokens` hardly has none.

        What is launched kernel by kernel takes as long as twice the tokens of the largest graph do (H200, 8B: 28 ms for
        a step of 640 tokens as for one of 1,056, 17 ms for 512).
        """
        is_hardly_larger = self.graph_tokens < tokens + decode_batch < 2 * self.graph_tokens
        return self.graph_tokens - decode_batch if is_hardly_larger else tokens

    def learn(self, step_ms: float, work: float, alone_ms: float, mix: Mix, rate: float) -> None:
        """From a step of `work`."""
        by_work_ms, floor_ms = self._prior.ms(alone_ms, mix, work / rate), self._floor.value * alone_ms
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
