# SPDX-License-Identifier: Apache-2.0
"""The design's invariants over thousands of random schedules of the real scheduler, worker and lane.

Only the model is a stand-in (stand_ins.py) and the GPU virtual (virtual_gpu.py), so a schedule takes some milliseconds.
What fails is made small and printed; PDMUX_SCHEDULE="Schedule(...)" runs that one again. PDMUX_EXAMPLES sets the number
of schedules of each kind, PDMUX_SEED draws others.
"""

from __future__ import annotations

import os
from collections import Counter

import model_check
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from model_check import BLOCK, EVENTS, LAYERS, Plan, Schedule, check
from watch import FUSED

EXAMPLES = int(os.environ.get("PDMUX_EXAMPLES", "400"))
SEED, REPLAY = os.environ.get("PDMUX_SEED"), os.environ.get("PDMUX_SCHEDULE")
ENOUGH = 100  # schedules in which everything must have happened

CHATS = (Plan(own_tokens=10, max_tokens=50), Plan(own_tokens=5, max_tokens=40, step=1))  # decode while others arrive
some_step = st.sampled_from([0, 3, 4, 5, 5, 6, 7]) | st.integers(0, 25)  # often in the lane together
some_ms = st.lists(st.sampled_from([1.0, 0.1, 0.3, 3.0, 20.0]), min_size=1, max_size=4).map(tuple)
some_layers = st.sampled_from([1, 1, 2, 3, 7, 1000])


@st.composite
def some_plan(draw, kv_blocks):
    most = (kv_blocks - 1) * BLOCK  # what fits in the KV cache
    shared = draw(st.integers(0, min(4, most // BLOCK - 2)))
    own = draw(st.integers(1, min(40, most - shared * BLOCK - 1)))
    step = draw(some_step)
    return Plan(
        own_tokens=own,
        max_tokens=draw(st.integers(1, min(30, most - shared * BLOCK - own))),
        shared_blocks=shared,
        content=draw(st.integers(0, 2)),
        step=step,
        stop_at=draw(st.none() | st.none() | st.integers(0, 6)),
        abort=draw(st.none() | st.none() | st.integers(step, step + 15)),
        is_abort_in_flight=draw(st.booleans()),
        is_sent_again=draw(st.booleans()),
        priority=draw(st.integers(0, 2)),
        wants_prompt_logprobs=draw(st.sampled_from([False, False, False, True])),
    )


def some_settings():
    table = st.fixed_dictionaries({"policy": st.just("table")}, optional={"decode_bs_divisor": st.integers(1, 6)})
    layers = st.fixed_dictionaries({"layers_per_group": some_layers}, optional={"max_prefill_tokens": some_tokens})
    budget = st.fixed_dictionaries({"split_forward_token_budget": st.sampled_from([8, 60, 300])})
    fixed = st.fixed_dictionaries(
        {"policy": st.just("fixed"), "fixed_group": st.integers(1, 6)}, optional={"layers_per_group": some_layers}
    )
    targets = {name: st.sampled_from([0.5, 2.0, 10.0, 200.0]) for name in ("itl_slo_ms", "ttft_slo_ms")}
    targets |= {"prefill_wait_limit_ms": st.sampled_from([5.0, 50.0]), "sharing": st.just("disjoint")}
    slo = st.fixed_dictionaries({"policy": st.just("slo")}, optional={**targets, "max_prefill_tokens": some_tokens})
    others = st.sampled_from([{"policy": "off"}, {"lane": "serial"}])
    return st.one_of(layers, layers, table, budget, fixed, slo, slo, others)


some_tokens = st.sampled_from([8, 20, 50])
some_fault = st.integers(0, LAYERS - 1) | st.sampled_from(["sample", "output"])


@st.composite
def some_schedule(draw, use_v2, look_ahead):
    kv_blocks = draw(st.sampled_from([64, 24, 14, 9]))
    plans = draw(st.lists(some_plan(kv_blocks), min_size=1, max_size=8))
    return Schedule(
        plans=(*CHATS[: draw(st.integers(0, len(CHATS)))], *plans),
        use_v2=use_v2,
        look_ahead=look_ahead,
        has_gpu=draw(st.sampled_from([True, True, False])),
        settings=draw(some_settings()),
        fused=draw(st.sampled_from(FUSED)),
        chunk=draw(st.sampled_from([256, 50, 16])),
        kv_blocks=kv_blocks,
        has_priorities=draw(st.booleans()),
        decode_ms=draw(some_ms),
        layer_ms=draw(some_ms),
        host_ms=draw(st.sampled_from([0.01, 0.2, 3.0])),
        is_read_early=draw(st.booleans()) if look_ahead else False,
        faults=draw(st.dictionaries(st.integers(0, 6), some_fault, max_size=2)),
        events=draw(st.dictionaries(some_step, st.sampled_from(EVENTS), max_size=4)),
    )


def schedules(use_v2, look_ahead):
    if REPLAY is not None:
        return st.just(eval(REPLAY, vars(model_check)))  # noqa: S307 - of whoever runs the tests
    return some_schedule(use_v2, look_ahead)


random_schedules = settings(
    max_examples=EXAMPLES,
    derandomize=SEED is None,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


# A V1 runner knows the tokens of its last step alone: stock vLLM loses some where it looks two steps ahead.
@pytest.mark.parametrize("use_v2, look_ahead", [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_any_schedule(lab, use_v2, look_ahead):
    counts = Counter()

    @random_schedules
    @given(schedule=schedules(use_v2, look_ahead))
    def search(schedule):
        counts.update(check(lab, schedule), schedules=1)

    (search if SEED is None else seed(int(SEED))(search))()
    print(f"Model Runner {'V2' if use_v2 else 'V1'}, look-ahead {look_ahead}: {dict(counts)}")
    for what in ("joins", "aborts", "preemptions", "drops", "faults", "losses"):
        assert counts[what] > counts["schedules"] / 100 or counts["schedules"] < ENOUGH, f"too few {what}: {counts}"


# What random schedules have found, made small.
FOUND = {
    "a prompt that is preempted and admitted in one step goes on in the lane that has its first chunk": Schedule(
        plans=(
            Plan(own_tokens=1, max_tokens=13),
            Plan(own_tokens=1, max_tokens=1, step=1),
            Plan(own_tokens=1, max_tokens=1, shared_blocks=2, step=2, wants_prompt_logprobs=True),
        ),
        use_v2=True,
        settings={"layers_per_group": 1},
        chunk=16,
        faults={0: "sample"},
    ),
    "a step that waits for nothing reports a batch that raised later than steps in flight report": Schedule(
        plans=(
            Plan(own_tokens=1, max_tokens=1, step=15),
            Plan(own_tokens=13, max_tokens=5, shared_blocks=1, step=10),
            Plan(own_tokens=1, max_tokens=7, step=5),
            Plan(own_tokens=17, max_tokens=1, shared_blocks=4, step=14),
        ),
        use_v2=True,
        look_ahead=2,
        settings={"max_prefill_tokens": 20},
        fused=(40, 3),
        faults={0: 0},
    ),
    "the first tokens of a batch cannot be read": Schedule(
        plans=(Plan(own_tokens=10, max_tokens=20), Plan(own_tokens=40, max_tokens=5, step=4)),
        look_ahead=1,
        faults={0: "output"},
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found(lab, what):
    assert check(lab, FOUND[what])["errors"] == 1
