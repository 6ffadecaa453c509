# SPDX-License-Identifier: Apache-2.0
"""What a policy is asked, what it answers, and what it is told of the steps that have run."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# More layers than any model has: "the rest of this prefill". A number, so that it can be compared and sent as it is.
ALL_LAYERS = 1 << 30
ALL_TOKENS = 1 << 30  # likewise: as many as vLLM's own limit
MOST_WAITING = 32  # prompts that wait of which a load has the work, at most: it is added up in each step

# Why a fused step: prompts end sooner than in the lane; they would not, but for the time that it takes to begin with an
# empty lane; the policy is off.
SOONER, LANE_EMPTY, OFF = "sooner", "lane_empty", "off"


@dataclass(frozen=True)
class Load:
    """The work of the coming step."""

    decode_batch: int  # requests decoding
    prefill_tokens: int  # new tokens in the prefill batch, 0 when there is none
    model_layers: int
    context_tokens: int = 0  # of all decoding requests together
    prefill_work: float = 0.0  # of the prefill batch, see PromptWork
    computed_tokens: int = 0  # of the prompt that is to be prefilled next
    oldest_wait_ms: float = 0.0  # since the oldest request without a first token arrived
    waiting_work: float = 0.0  # of the prompts that wait outside the lane, or of the first MOST_WAITING
    # In order, for each first token that is to come: the work until then, that in the lane included, and for how many
    # ms its request has waited.
    first_tokens: tuple[tuple[float, float], ...] = ()
    is_lane_busy: bool = False  # whether a prefill batch is in the lane


@dataclass(frozen=True)
class Decision:
    """How the coming step runs."""

    group: int  # index of the stream group
    layers: int  # to advance the prefill by; more than are left means all that are


class Kind(Enum):
    """What a step was."""

    DECODE = "decode"  # nothing to prefill
    PREFILL = "prefill"  # nothing decoding
    FUSED = "fused"  # both in one batch
    BESIDE = "beside"  # both, each in its lane


@dataclass(frozen=True)
class Observation:
    """A step that has run."""

    kind: Kind
    step_ms: float
    decode_batch: int = 0
    context_tokens: int = 0  # of all decoding requests together
    prefill_work: float = 0.0  # that went through the model, see PromptWork; through a part of its layers, that part
    group: int = 0  # of a BESIDE step


@dataclass(frozen=True)
class Prompt:
    """A prompt that waits for prefill, or for the rest of it."""

    work: float  # that is left, see PromptWork
    age_ms: float  # since the request arrived


class Policy(Protocol):
    """Decides how the lanes share the device. One object serves one scheduler; its decisions travel to all ranks."""

    observes: bool  # whether `observe` wants to be called
    fuses: bool  # whether `fused_tokens` may be anything but 0
    fused_reason: str  # why its last answer was not 0

    def decide(self, load: Load) -> Decision: ...

    def fused_tokens(self, load: Load) -> int:
        """New prompt tokens for a step that decodes and prefills in one batch, stock vLLM's way; 0: use the lanes."""

    def overtakes(self, waiting: Prompt, begun: Prompt) -> bool:
        """Whether the next batch is `waiting`'s though the prompt `begun` is half done. Never twice in succession."""

    def expected_ms(self, step: Observation) -> float | None:
        """What such a step is believed to take, before it is learned from; None: nothing is believed of it."""

    def target_ms(self, step: Observation) -> float | None:
        """What such a step should take at most; None: there is no target."""

    def observe(self, step: Observation) -> None:
        """Learn from a step that has run."""


class Unlearning:
    """A policy that decides by the load alone and never fuses."""

    observes = fuses = False
    fused_reason = ""

    def fused_tokens(self, load: Load) -> int:
        """Never."""
        return 0

    def overtakes(self, waiting: Prompt, begun: Prompt) -> bool:
        """Never: in order of arrival."""
        return False

    def expected_ms(self, step: Observation) -> None:
        """Nothing."""

    def target_ms(self, step: Observation) -> None:
        """None."""

    def observe(self, step: Observation) -> None:
        """Nothing to learn."""


def why_fused(fused_ms: float, lane_ms: float) -> str:
    """Why a fused step, where prompts would take so long in fused steps, and so long in a lane that has begun."""
    return SOONER if fused_ms < lane_ms else LANE_EMPTY


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
