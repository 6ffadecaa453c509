# SPDX-License-Identifier: Apache-2.0
"""The fixed policy: one group whenever both lanes have work. The baseline that every other policy has to beat."""

from dataclasses import dataclass

from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.types import Decision, Load, Unlearning, decide_alone


@dataclass(frozen=True)
class FixedPolicy(Unlearning):
    """Always `group`, one of 1..`splits`, while both lanes have work."""

    group: int
    splits: int
    layers: LayerRule

    def __post_init__(self) -> None:
        if not 1 <= self.group <= self.splits:
            raise ValueError(f"group {self.group} is not one of the mixed groups 1..{self.splits}")

    def decide(self, load: Load) -> Decision:
        """Both lanes busy: `group`, and the layer rule's layers. Else the busy lane has the device to itself."""
        return decide_alone(load, self.splits) or Decision(self.group, self.layers.layers(load))
