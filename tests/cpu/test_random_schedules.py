# SPDX-License-Identifier: Apache-2.0
"""Random schedules: whatever arrives, is aborted, preempted, reset or paused, tokens are stock's and nothing is left.

PDMUX_EXAMPLES sets the number of schedules.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import pytest
from driver import ENGINE, LANE_THREAD, Arrival, prompt
from hypothesis import HealthCheck, event, example, given, settings, target
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from vllm_pdmux.messages import order_of

EXAMPLES = int(os.environ.get("PDMUX_EXAMPLES", "40"))
BLOCK, MAX_TOKENS, MAX_PROMPT = ENGINE["block_size"], 25, 220


@dataclass(frozen=True)
class Plan:
    """One request of a schedule. `abort` is the step after which it is aborted, None: never."""

    shared_blocks: int  # blocks of a prefix that all plans share
    own_tokens: int
    content: int  # two plans with the same content and lengths have the same prompt
    max_tokens: int
    step: int
    abort: int | None
    abort_in_flight: bool  # the abort arrives while the step runs, not between two steps

    @property
    def tokens(self):
        return [*prompt(self.shared_blocks * BLOCK, 1), *prompt(self.own_tokens, 100 + self.content)]


@dataclass(frozen=True)
class Schedule:
    plans: tuple[Plan, ...]
    layers: int
    chunk: int
    seed: int | None  # None: greedy
    max_active: int
    disturbance: str  # what happens once, after `disturbed_at`
    disturbed_at: int


DISTURBANCES = ["none", "reset", "pause", "pause and reset", "pause new"]


@st.composite
def plans(draw, max_prompt):
    shared = draw(st.integers(0, max(0, max_prompt - 1) // BLOCK))
    step = draw(st.integers(0, 30))
    aborted = draw(st.booleans()) and draw(st.booleans())
    return Plan(
        shared_blocks=shared,
        own_tokens=draw(st.integers(1, max_prompt - shared * BLOCK)),
        content=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, MAX_TOKENS)),
        step=step,
        abort=step + draw(st.integers(0, 20)) if aborted else None,
        abort_in_flight=draw(st.booleans()),
    )


@st.composite
def schedules(draw):
    chunk = draw(st.sampled_from([16, 50, 256]))
    # A CPU generator cannot be wound back: stock vLLM's steps die of a seeded prompt that is split. The budget of a
    # step is shared, so only requests that fit in it together are never split.
    seed = draw(st.none() | st.integers(0, 99)) if chunk == 256 else None
    count = draw(st.integers(1, 8))
    return Schedule(
        plans=tuple(draw(plans(MAX_PROMPT if seed is None else chunk // count)) for _ in range(count)),
        layers=draw(st.sampled_from([1, 2, 3, 7, 1000])),
        chunk=chunk,
        seed=seed,
        max_active=draw(st.sampled_from([16, 16, 16, 3, 1])),
        disturbance=draw(st.sampled_from(DISTURBANCES)),
        disturbed_at=draw(st.integers(1, 40)),
    )
