# SPDX-License-Identifier: Apache-2.0
"""How many layers a prefill advances between two decode steps."""

from dataclasses import dataclass

from vllm_pdmux.policy.types import Load

# Decode steps that fit in one prefill when the user sets nothing: enough that the decode lane is launched often beside
# any prompt, few enough that the launch of a layer group stays worth its cost.
DECODE_STEPS_PER_PREFILL = 8


@dataclass(frozen=True)
class LayerRule:
    """The size of a layer group. The first of these that is set counts; None is "not set by the user".

    `layers_per_group`: that many layers. `split_forward_token_budget`: SGLang's rule, layers times new tokens within
    the budget, one layer at least. Neither: an eighth of the model's layers, rounded up.
    """

    layers_per_group: int | None = None
    split_forward_token_budget: int | None = None

    def layers(self, load: Load) -> int:
        """Layers to advance in this step, at least 1; it may exceed the model's."""
        if self.layers_per_group is not None:
            return self.layers_per_group
        if self.split_forward_token_budget is not None:
            return max(1, self.split_forward_token_budget // max(1, load.prefill_tokens))
        return max(1, -(-load.model_layers // DECODE_STEPS_PER_PREFILL))
