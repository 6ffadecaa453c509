# SPDX-License-Identifier: Apache-2.0
"""The policy off: stock vLLM's steps, through the plugin. It shows what the plugin itself costs."""

from dataclasses import dataclass

from vllm_pdmux.policy.types import ALL_LAYERS, ALL_TOKENS, OFF, Decision, Load, Unlearning, decide_alone


@dataclass(frozen=True)
class OffPolicy(Unlearning):
    """Every step is fused, with all the tokens that stock vLLM allows it."""

    splits: int
    fuses = True
    fused_reason = OFF

    def decide(self, load: Load) -> Decision:
        """Asked only for a batch that another policy has put into the lane: it ends there."""
        return decide_alone(load, self.splits) or Decision(1, ALL_LAYERS)

    def fused_tokens(self, load: Load) -> int:
        """All."""
        return ALL_TOKENS
