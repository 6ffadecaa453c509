# SPDX-License-Identifier: Apache-2.0
"""What a policy is asked, and what it answers."""

from dataclasses import dataclass
from typing import Protocol

# More layers than any model has: "the rest of this prefill". A number, so that it can be compared and sent as it is.
ALL_LAYERS = 1 << 30


@dataclass(frozen=True)
class Load:
    """The work of the coming step."""

    decode_batch: int  # requests decoding
    prefill_tokens: int  # new tokens in the prefill batch, 0 when there is none
    model_layers: int


@dataclass(frozen=True)
class Decision:
    """How the coming step runs."""

    group: int  # index of the stream group
    layers: int  # to advance the prefill by; more than are left means all that are


class Policy(Protocol):
    """Decides from the load alone, so that the same load gives the same decision on every rank and in every run."""

    def decide(self, load: Load) -> Decision: ...


def decide_alone(load: Load, splits: int) -> Decision | None:
    """The decision when a lane has the device to itself, the same for every policy; None when both have work.

    Nothing decoding: group 0, all SMs and all layers, since nobody waits for control to come back. Nothing to
    prefill: group `splits + 1`, no layers.
    """
    if load.decode_batch == 0:
        return Decision(0, ALL_LAYERS)
    if load.prefill_tokens == 0:
        return Decision(splits + 1, 0)
    return None
