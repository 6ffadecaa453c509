# SPDX-License-Identifier: Apache-2.0
"""The table policy: the decode batch chooses the row. It is what SGLang's configuration file describes."""

from dataclasses import dataclass

from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.types import Decision, Load, Unlearning, decide_alone


@dataclass(frozen=True)
class TablePolicy(Unlearning):
    """Chooses among the mixed groups 1..`splits` by the number of requests decoding.

    `thresholds[i]` is the smallest decode batch for group `i + 1`. The largest threshold that is met wins, wherever its
    row stands, a later row over an earlier one with the same threshold; below every threshold group 1 is used. (SGLang
    takes the last row met, and fails below all of them.) Without thresholds the share grows evenly with the batch and
    reaches the last group at `decode_bs_divisor` requests, as in SGLang.
    """

    thresholds: tuple[int, ...]
    splits: int
    decode_bs_divisor: int
    layers: LayerRule

    def __post_init__(self) -> None:
        if self.splits < 1 or self.decode_bs_divisor < 1:
            raise ValueError(f"splits ({self.splits}) and decode_bs_divisor ({self.decode_bs_divisor}) must be >= 1")
        if self.thresholds and len(self.thresholds) != self.splits:
            raise ValueError(f"{len(self.thresholds)} thresholds for {self.splits} splits: give one for each, or none")

    def decide(self, load: Load) -> Decision:
        """Both lanes busy: the row of this decode batch, and the layer rule's layers. Else the busy lane has it all."""
        return decide_alone(load, self.splits) or Decision(self._group(load.decode_batch), self.layers.layers(load))

    def first_batches(self) -> tuple[int, ...]:
        """For each mixed group in order, the decode batch from which it qualifies; the largest that is met wins."""
        if self.thresholds:
            return self.thresholds
        return 1, *(-(-group * self.decode_bs_divisor // self.splits) for group in range(2, self.splits + 1))

    def _group(self, decode_batch: int) -> int:
        if not self.thresholds:
            return min(max(decode_batch * self.splits // self.decode_bs_divisor, 1), self.splits)
        met = [(threshold, group) for group, threshold in enumerate(self.thresholds, 1) if threshold <= decode_batch]
        return max(met)[1] if met else 1
