# SPDX-License-Identifier: Apache-2.0
"""In the place of a policy while an engine is measured: decides what is measured and notes every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import (
    ALL_LAYERS,
    SOONER,
    Decision,
    FixedPolicy,
    LayerRule,
    Load,
    Observation,
    Prompt,
    PromptWork,
)
from vllm_pdmux.step_times import StepTime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Recorder:
    """The policy meanwhile: one group always, fused steps when asked for; notes every step, saturated or not."""

    observes = fuses = True
    fused_reason = SOONER  # the prompts that are measured are to end in them

    def __init__(self, splits: int):
        self._splits = splits
        self.steps: list[Observation] = []
        self.saturated: list[bool] = []  # whether the lane had layers to run during all of the step
        self.lane_was_saturated = True
        self.fused = 0
        self.use(1)

    def use(self, group: int) -> None:
        """Both lanes in `group` from now on, and nothing noted yet."""
        self._fixed = FixedPolicy(group, self._splits, LayerRule(layers_per_group=ALL_LAYERS))
        self.clear()

    def clear(self) -> None:
        self.steps, self.saturated = [], []

    def decide(self, load: Load) -> Decision:
        return self._fixed.decide(load)

    def fused_tokens(self, load: Load) -> int:
        return self.fused

    def overtakes(self, waiting: Prompt, begun: Prompt) -> bool:
        return False

    def expected_ms(self, step: Observation) -> None:
        """Nothing: that is what is measured."""

    def target_ms(self, step: Observation) -> None:
        """None."""

    def observe(self, step: Observation) -> None:
        self.steps.append(step)
        self.saturated.append(self.lane_was_saturated)


class RecordingObserver(Observer):
    """Tells of every step, and whether the lane was saturated."""

    def __init__(self, recorder: Recorder):
        super().__init__(recorder, PromptWork())  # work in tokens
        self._recorder = recorder

    def done(self, output: SchedulerOutput, took: StepTime, beside_work: float, is_saturated: bool) -> None:
        self._recorder.lane_was_saturated = is_saturated
        super().done(output, took, beside_work, True)
