# SPDX-License-Identifier: Apache-2.0
"""Random schedules: whatever arrives, is aborted, preempted, reset or paused, tokens are stock's and nothing is left.

PDMUX_EXAMPLES sets the number of schedules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from driver import ENGINE, Arrival, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from watch import FUSED, Watch, fuse_now_and_then

from vllm_pdmux.messages import order_of
from vllm_pdmux.worker.prefill_runner import generators_set_aside

EXAMPLES = int(os.environ.get("PDMUX_EXAMPLES", "40"))
BLOCK, MAX_PROMPT, MAX_TOKENS = ENGINE["block_size"], 220, 25
SMALL_KV = 20  # blocks: three of the longest requests do not fit


@dataclass(frozen=True)
class Plan:
    """One request of a schedule."""

    shared_blocks: int  # of a prefix that all prompts share
    own_tokens: int
    content: int  # prompts of equal lengths and content are equal
    max_tokens: int
    step: int
    abort: int | None  # the step after which it is aborted
    abort_in_flight: bool  # it is aborted while that step runs, not after it

    @property
    def tokens(self) -> list[int]:
        return [*prompt(self.shared_blocks * BLOCK, 1), *prompt(self.own_tokens, 100 + self.content)]


@dataclass(frozen=True)
class Schedule:
    """What happens to an engine."""

    plans: list[Plan]
    layers: int
    fused: tuple[int, int] | None  # of FUSED
    chunk: int
    seed: int | None  # None: greedy
    max_active: int
    disturbance: str  # of DISTURBANCES, once
    disturbed_at: int  # the step after which it happens


CHATS = [Plan(0, 20 + 15 * i, 9, MAX_TOKENS, 0, None, False) for i in range(2)]  # decode while the others arrive
some_step = st.sampled_from([0, 3, 4, 5, 5, 6, 8, 9]) | st.integers(0, 30)  # often in the lane together


@st.composite
def some_plan(draw):
    shared = draw(st.integers(0, (MAX_PROMPT - 1) // BLOCK))
    step = draw(some_step)
    return Plan(
        shared_blocks=shared,
        own_tokens=draw(st.integers(1, MAX_PROMPT - shared * BLOCK)),
        content=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, MAX_TOKENS)),
        step=step,
        abort=draw(st.none() | st.none() | st.integers(step, step + 12)),
        abort_in_flight=draw(st.booleans()),
    )


def some_schedule():
    return st.builds(
        Schedule,
        plans=st.lists(some_plan(), min_size=1, max_size=6).map(lambda plans: [*CHATS, *plans]),
        layers=st.sampled_from([1, 1, 2, 3, 7, 1000]),
        fused=st.sampled_from(FUSED),
        chunk=st.sampled_from([16, 50, 256]),
        seed=st.none() | st.integers(0, 99),
        max_active=st.sampled_from([16, 16, 16, 16, 3, 1]),
        disturbance=st.sampled_from(list(DISTURBANCES)),
        disturbed_at=st.integers(1, 30),
    )


# --- what may happen once in a schedule -----------------------------------------------------------------------------


def nothing(driver):
    """The schedule runs as it is."""


def reset(driver):
    """All running requests are preempted and the prefix cache is emptied."""
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)


def pause(driver):
    """Nothing runs until some steps later."""
    driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def pause_for_new_weights(driver):
    """vLLM's pause mode "keep": the KV cache of all requests is dropped too."""
    pause(driver)
    reset(driver)


def pause_new(driver):
    """What runs goes on, what waits waits until some steps later."""
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)


DISTURBANCES = {action.__name__: action for action in (nothing, reset, pause, pause_for_new_weights, pause_new)}
PAUSE_STEPS = 3


class Script:
    """A hook that aborts and disturbs at the steps that the schedule names."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __call__(self, driver):
        step = driver.step_number
        for name, plan in named(self.schedule).items():
            if plan.abort is not None and step == plan.abort - plan.abort_in_flight:
                abort_in_flight(driver, name) if plan.abort_in_flight else driver.abort(name)
        if step == self.schedule.disturbed_at:
            DISTURBANCES[self.schedule.disturbance](driver)
        if step == self.schedule.disturbed_at + PAUSE_STEPS:
            driver.scheduler.set_pause_state(PauseState.UNPAUSED)


def abort_in_flight(driver, name):
    """Abort a request so that the engine hears of it between the next step's execution and its update."""
    driver.core.aborts_queue.put(driver.engine.output_processor.abort_requests([name], internal=False))


def named(schedule):
    return {f"r{i}": plan for i, plan in enumerate(schedule.plans)}


# --- what must hold in every step -----------------------------------------------------------------------------------


class LaneWatch(Watch):
    """Checks each step from what the lane reported."""

    def __init__(self, driver):
        super().__init__(driver.scheduler)
        self.was_idle = False
        self.layer_of = {}  # batch id -> the layer where it stands

    def check_lanes(self, output):
        order, record = order_of(output), self.scheduler.pdmux_trace.steps[-1]
        if order.batch_id is not None:
            assert record.batch_id == order.batch_id
            assert record.first_layer == self.layer_of.get(order.batch_id, 0), "a layer was left out or run twice"
            assert record.end_layer > record.first_layer, "the lane stood still"
            self.layer_of[order.batch_id] = record.end_layer
        idle = output.total_num_scheduled_tokens == 0 and order.batch_id is None
        assert not (idle and self.was_idle and self.scheduler.has_unfinished_requests()), "no lane does anything"
        self.was_idle = idle


# --- the engines ----------------------------------------------------------------------------------------------------


class Oracle:
    """Stock vLLM, one request at a time: its tokens depend on no other request, and no prompt of it is chunked."""

    def __init__(self, driver):
        self.driver, self.answers = driver, {}

    def tokens(self, plan, seed):
        key = (tuple(plan.tokens), seed)
        if key not in self.answers:
            arrival = Arrival("alone", plan.tokens, sampling(MAX_TOKENS, seed))
            self.answers[key] = self.driver.run([arrival])["alone"].tokens[0]
        return self.answers[key][: plan.max_tokens]


class Subject:
    """The engine with the plugin; a new one after a failure, so that the next example starts with a sound one."""

    def __init__(self, start):
        self.start, self.driver = start, None

    def __enter__(self):
        if self.driver is None:
            self.driver = self.start()
            repair_seeded_chunks(self.driver.worker.model_runner)
        return self.driver.fresh()

    def __exit__(self, exc_type, *_):
        self.driver.scheduler.max_num_active_reqs = ENGINE["max_num_seqs"]
        if exc_type is not None:
            self.driver.worker._prefill_lane.close()
            self.driver = None


def repair_seeded_chunks(runner):
    """Let the engine's own steps sample a seeded prompt that is chunked, of which stock vLLM dies on a CPU."""
    original = runner.sample_tokens

    def sample_tokens(grammar_output):
        with generators_set_aside(runner):
            return original(grammar_output)

    runner.sample_tokens = sample_tokens


def sampling(max_tokens, seed):
    random = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **random)


@pytest.fixture(scope="module")
def oracle(start_engine, tiny_model_path):
    return Oracle(start_engine(tiny_model_path))


@pytest.fixture(scope="module", params=["fcfs", "priority"])
def subject(start_engine, tiny_model_path, request):
    options = {"num_gpu_blocks_override": SMALL_KV, "scheduling_policy": request.param}
    return Subject(lambda: start_engine(tiny_model_path, pdmux={}, **options))


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(schedule=some_schedule())
def test_any_schedule(oracle, subject, schedule):
    """Tokens of requests that were not aborted are stock's, those of the others a beginning of stock's."""
    with subject as pdmux:
        pdmux.set_layers_per_group(schedule.layers)
        fuse_now_and_then(pdmux.scheduler, schedule.fused)
        pdmux.set_chunk(schedule.chunk)
        pdmux.scheduler.max_num_active_reqs = schedule.max_active
        got = run(pdmux, schedule)
        for name, plan in named(schedule).items():
            expected, tokens = oracle.tokens(plan, schedule.seed), (got[name].tokens or [[]])[0]
            if plan.abort is None:
                assert tokens == expected, f"tokens of {name}"
            else:
                assert tokens == expected[: len(tokens)], f"tokens of {name}"
        pdmux.assert_nothing_left()


def run(pdmux, schedule):
    script = Script(schedule)
    arrivals = [
        Arrival(name, plan.tokens, sampling(plan.max_tokens, schedule.seed), plan.step, priority=plan.content)
        for name, plan in named(schedule).items()
    ]
    with LaneWatch(pdmux) as watch:

        def after_step(driver):
            watch.check_step()
            script(driver)

        got = pdmux.run(arrivals, after_step)
        pdmux.scheduler.set_pause_state(PauseState.UNPAUSED)  # all that ran may have been aborted meanwhile
        return got
