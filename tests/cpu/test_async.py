# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: the next step is scheduled before the tokens of this one are known.

The CPU build of vLLM forces it off, so the engine's real loop (`EngineCore.step_with_batch_queue`), scheduler, worker
mixin, lane and hand-over run here over stand-ins for the two runners (stand_ins.py), once for V1 and once for Model
Runner V2.

The last but one part runs vLLM's real V1 runner, which is asynchronous on a CPU but for its copy from the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
from async_engine import Arrival, Engine, Engines
from driver import ENGINE, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_ins import BLOCK, LAYER_NAMES, LAYERS, answer, session_answer
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import RequestStatus
from vllm.v1.worker import gpu_model_runner
from watch import FUSED, Fusing, Watch, fuse_now_and_then

from vllm_pdmux.messages import order_of
from vllm_pdmux.scheduler import PDMuxAsyncScheduler

EXAMPLES = int(os.environ.get("PDMUX_EXAMPLES", "60"))


# --- one thing at a time --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tiny_model_path):
    return Engines(tiny_model_path)


# The runner, the steps that reports come late, the batches in the lane at most. A batch that is dropped before it began
# cannot be resumed by a V1 runner, which knows nothing of its requests: there the lane has one batch.
@pytest.fixture(
    params=[("V1", 0, 1), ("V1", 2, 1), ("V2", 0, 1), ("V2", 0, 2), ("V2", 1, 2), ("V2", 2, 2)],
    ids=lambda p: f"{p[0]}, reported {p[1]} steps late, {p[2]} batches",
)
def pdmux(engines, request):
    runner, report_delay, batches = request.param
    with engines.lend(True, runner == "V2") as engine:
        yield engine.fresh(report_delay=report_delay, batches=batches)
        engine.assert_nothing_left()


def chats(n=3, max_tokens=40):
    """Requests that decode while something else arrives."""
    return [Arrival(f"chat{i}", prompt(20 + 7 * i, i), max_tokens) for i in range(n)]


def late(name="long", length=200, step=5, seed=100, **options):
    return Arrival(name, prompt(length, seed), step=step, **options)


def assert_answers(got, arrivals, *but):
    for arrival in arrivals:
        if arrival.name not in but:
            assert got[arrival.name] == arrival.answer, f"tokens of {arrival.name}"


class Once:
    """A hook that does `action` the first time `when` holds."""

    def __init__(self, when, action):
        self.when, self.action, self.done = when, action, False

    def __call__(self, engine):
        if not self.done and self.when(engine):
            self.done = True
            self.action(engine)


@pytest.mark.parametrize("use_v2", [False, True])
@pytest.mark.parametrize("scheduler", [AsyncScheduler, PDMuxAsyncScheduler])
def test_the_engine_is_asynchronous(engines, scheduler, use_v2):
    with engines.lend(scheduler is PDMuxAsyncScheduler, use_v2) as engine:
        assert type(engine.scheduler) is scheduler
        assert engine.core.step_fn == engine.core.step_with_batch_queue and engine.core.batch_queue_size == 2
        assert engine.scheduler.use_v2_model_runner == use_v2


@pytest.mark.parametrize("layers", [1, 3, 1000])
@pytest.mark.parametrize("chunk", [50, 256])
def test_arrivals_while_others_decode(pdmux, layers, chunk):
    pdmux.fresh(layers, chunk, pdmux.report_delay, pdmux.scheduler._admission.max_batches)
    arrivals = [*chats(), late(), late("same", step=9), late("short", 3, 9, 4), late("burst", 60, 9, 5)]
    assert_answers(pdmux.run(arrivals), arrivals)
    steps = pdmux.lane_steps()
    assert len(steps) > sum(step.batch_ended for step in pdmux.scheduler.pdmux_trace.steps) > 0 or layers == 1000
    assert max(step.decode_batch for step in steps) >= 3, "no layers ran beside a decode step"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_the_first_tokens_are_the_last(pdmux, max_tokens):
    arrivals = [*chats(), late(max_tokens=max_tokens), late("again", step=20, max_tokens=max_tokens)]
    assert_answers(pdmux.run(arrivals), arrivals)
    assert pdmux.reasons["long"] == "length"


class LaunchWatch:
    """Notes, of each step of the lane, whether a batch was to be run to its end, the group, and what ran."""

    def __init__(self, lane, monkeypatch):
        self.steps, self._group = [], None
        use, launch = lane._device.use, lane._launch

        def noted_use(group, runner):
            self._group = group
            use(group, runner)

        def noted_launch(layers, to_its_end):
            runs = launch(layers, to_its_end)
            self.steps.append((to_its_end, self._group, runs))
            return runs

        monkeypatch.setattr(lane._device, "use", noted_use, raising=False)
        monkeypatch.setattr(lane, "_launch", noted_launch)


@pytest.mark.parametrize("report_delay", [0, 1])
def test_what_decodes_next_does_not_wait_for_the_batch_behind(engines, monkeypatch, report_delay):
    """The chat ends while two batches are in the lane: the first is run to its end on all SMs, the second is not, since
    the first one's requests are about to decode."""
    with engines.lend(True, True) as engine:
        engine.fresh(1, 256, report_delay, 2)
        monkeypatch.setattr(engine.scheduler._admission, "most_tokens", 200)
        watch = LaunchWatch(engine.worker._prefill_lane, monkeypatch)
        arrivals = [Arrival("chat", prompt(20, 1), 10), late("first"), late("second", seed=101)]
        assert_answers(engine.run(arrivals), arrivals)
        monkeypatch.undo()
    place = next(place for place, (to_its_end, _, _) in enumerate(watch.steps) if to_its_end)
    (_, group, runs), (next_to_its_end, next_group, next_runs) = watch.steps[place : place + 2]
    assert group == 0 and [run.batch_id for run in runs] == [runs[0].batch_id] and runs[0].end_layer == len(LAYER_NAMES)
    assert not next_to_its_end and next_group > 0
    assert [(run.batch_id, run.end_layer - run.first_layer) for run in next_runs] == [(runs[0].batch_id + 1, 1)]


class FuseFrom(Fusing):
    """Fused steps are better from an engine step on."""

    def __init__(self, policy, step):
        super().__init__(policy, 60, 1)
        self._step, self.engine_step = step, 0

    def fused_tokens(self, load):
        return self._tokens if self.engine_step >= self._step else 0


def test_the_lane_runs_empty_where_fused_steps_are_better(engines, monkeypatch):
    """They need an empty lane, which it would never be while prompts wait."""
    with engines.lend(True, True) as engine:
        engine.fresh(1, 256, 0, 2)
        fuse_now_and_then(engine.scheduler, (1, 1))  # a policy that is told of steps
        monkeypatch.setattr(engine.scheduler._admission, "most_tokens", 100)
        policy = engine.scheduler._pdmux_policy = FuseFrom(engine.scheduler._pdmux_policy, 14)
        arrivals = [*chats(), *(late(f"long{i}", 90, seed=100 + i) for i in range(8))]
        got = engine.run(arrivals, lambda engine: setattr(policy, "engine_step", engine.step_number))
        assert_answers(got, arrivals)
        begun = [step.batch_id for step in engine.scheduler.pdmux_trace.steps if step.prefill_tokens]
        fused = [step for step in engine.scheduler.pdmux_trace.steps if step.decode_tokens > step.decode_batch > 1]
        fuse_now_and_then(engine.scheduler, None)
    assert 1 <= len(begun) <= 3 and fused


@pytest.mark.parametrize("at", [0, 1, 5])
def test_stop_ids(pdmux, at):
    """The scheduler learns of a stop one step too late: the token behind it is dropped."""
    stop = [late().answer[at]]
    arrivals = [*chats(), late(stop=stop), late("after", 150, 12, 8)]
    assert_answers(pdmux.run(arrivals), arrivals)
    assert pdmux.reasons["long"] == "stop" and len(pdmux.tokens["long"]) <= at + 1


STAGES = {
    "queued": lambda engine: engine.step_number == 5 and not engine.in_lane("long"),
    "in a middle group": lambda engine: engine.in_lane("long") and engine.layer() == 4,
    "in the last group": lambda engine: engine.in_lane("long") and engine.is_launched("long"),
    "just joined": lambda engine: engine.step_number > 6 and not engine.in_lane("long"),
    "decoding": lambda engine: len(engine.tokens["long"]) == 3,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone in its batch", "with another in its batch"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "in a step"])
def test_abort_at_any_moment(pdmux, stage, beside, in_flight):
    others = [late("first", 60, 4, 55)] if stage == "queued" else []
    others += [late("beside", 40, 5, 77)] if beside else []
    arrivals = [*chats(), *others, late(), late("again", step=20)]
    hook = Once(STAGES[stage], lambda engine: engine.abort("long", in_flight))
    got = pdmux.run(arrivals, hook)
    assert hook.done, "the stage was never reached"
    assert_answers(got, arrivals, "long")
    assert got["long"] == late().answer[: len(got["long"])]


def test_an_id_that_is_aborted_and_sent_again_is_two_requests(pdmux):
    def again(engine):
        engine.abort("long")
        engine.tokens["long"] = []
        engine.core.add_request(late(length=90, seed=31).request(engine.core))

    arrivals = [*chats(), late("beside", 40, 5, 77), late()]
    hook = Once(STAGES["in a middle group"], again)
    got = pdmux.run(arrivals, hook)
    assert hook.done
    assert_answers(got, [*arrivals[:-1], late(length=90, seed=31)])


def test_preemption_when_the_kv_cache_is_small(pdmux):
    """A preempted request is prefilled again in the lane, with the tokens that it has said."""
    arrivals = [Arrival(f"r{i}", prompt(20 + 9 * i % 60, i), 110, step=i) for i in range(8)]
    preempted = set()

    def watch(engine):
        preempted.update(i for i, request in engine.scheduler.requests.items() if request.num_preemptions)

    assert_answers(pdmux.run(arrivals, watch), arrivals)
    assert preempted, "the cache was not small enough"


@pytest.mark.parametrize("said", [1, 2, 10])
def test_preemption_before_the_lane_has_another_batch(pdmux, said):
    """What it has said meanwhile comes with it, though the lane's runner was the last but one to know it."""
    hook = Once(lambda engine: len(engine.tokens["long"]) == said, preempt_last)
    arrivals = [*chats(), late()]
    got = pdmux.run(arrivals, hook)
    assert hook.done
    assert_answers(got, arrivals)
    assert len({step.batch_id for step in pdmux.lane_steps()}) == 2, "it was not prefilled again in the lane"


def preempt_last(engine):
    """What the scheduler does when it is out of blocks. Not to a session, whose turn may just have ended."""
    scheduler = engine.scheduler
    in_lane = {req_id for batch in getattr(scheduler, "_batches", []) for req_id in batch.requests}
    for request in reversed(scheduler.running):
        if request.request_id not in in_lane and not request.resumable:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            return


def squeeze(engine):
    """For some steps there are no blocks left. Not for a session, as in `preempt_last`."""
    if not any(request.resumable for request in engine.scheduler.requests.values()):
        engine.take_free_blocks()


def reset(engine):
    """All running requests are preempted and the prefix cache is emptied; stock refuses while a session waits."""
    engine.give_blocks_back()
    if not engine.scheduler.kv_holding_waiting:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def pause(engine):
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def pause_for_new_weights(engine):
    """vLLM's pause mode "keep"."""
    pause(engine)
    reset(engine)


def pause_new(engine):
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)


@pytest.mark.parametrize("action", [reset, pause, pause_for_new_weights])
def test_resets_and_pauses_when_a_prompts_next_chunk_has_found_no_blocks(engines, action):
    """It is preempted while its chunk before is in the lane, so it waits and is in the lane at once."""
    caught = []

    def hook(engine):
        request, batches = engine.scheduler.requests.get("long"), engine.scheduler._batches
        if not caught and engine.in_lane("long") and batches[0].layers_launched >= LAYERS - 3 and not engine.taken:
            engine.take_free_blocks()
        if not caught and request and request.status == RequestStatus.PREEMPTED and engine.in_lane("long"):
            caught.append(engine.step_number)
            engine.give_blocks_back()
            action(engine)
        if caught and engine.step_number == caught[0] + 4:
            resume(engine)

    arrivals = [*chats(), late()]
    with engines.lend(True, use_v2=True) as pdmux:
        got = pdmux.fresh(chunk=50, batches=2).run(arrivals, hook)
        assert caught
        assert_answers(got, arrivals)
        pdmux.assert_nothing_left()


@pytest.mark.parametrize("action", [reset, pause, pause_for_new_weights, pause_new])
@pytest.mark.parametrize("stage", ["in a middle group", "in the last group", "decoding"])
def test_resets_and_pauses(pdmux, action, stage):
    disturb = Once(STAGES[stage], action)
    resumed = []

    def hook(engine):
        disturb(engine)
        if disturb.done and not engine.scheduler.has_unfinished_requests() and not engine.core.batch_queue:
            resumed.append(engine.step_number)
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    arrivals = [*chats(), late(), late("beside", 40, 5, 77), late("queued", 50, 6, 9)]
    assert_answers(pdmux.run(arrivals, hook), arrivals)
    assert disturb.done and (resumed or action is reset)


# --- the real runner ------------------------------------------------------------------------------------------------


class HostOutput(gpu_model_runner.AsyncGPUModelRunnerOutput):
    """A step's output without a copy from a GPU: what it waits for is there."""

    def __init__(self, model_runner_output, sampled_token_ids, logprobs_tensors, invalid_req_indices, **of_a_gpu):
        self._model_runner_output, self._invalid_req_indices = model_runner_output, invalid_req_indices
        self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids
        self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
        self._num_nans = self._num_nans_cpu = self._has_fault = None
        self.async_copy_ready_event = SimpleNamespace(synchronize=lambda: None)


@pytest.fixture(scope="module")
def real_engines(tiny_model_path):
    """Stock and pdmux with vLLM's V1 CPU runner, which can be asynchronous but for the copy from the GPU."""
    runner = gpu_model_runner.GPUModelRunner
    with (
        mock.patch.object(gpu_model_runner, "AsyncGPUModelRunnerOutput", HostOutput),
        mock.patch.object(runner, "_get_or_create_async_output_copy_stream", lambda self: None),
    ):
        yield [Engine(tiny_model_path, pdmux, executor=UniProcExecutor) for pdmux in (None, {})]


def assert_same_as_one_at_a_time(real_engines, arrivals, layers, chunk):
    """Stock serves each alone, in one chunk; pdmux serves them as they arrive."""
    stock, pdmux = real_engines
    assert stock.worker.model_runner.use_async_scheduling and pdmux.worker._prefill_lane._runner.use_async_scheduling
    got = pdmux.fresh(layers, chunk).run(arrivals)
    for arrival in arrivals:
        expected = stock.fresh().run([replace(arrival, step=0)])[arrival.name]
        assert got[arrival.name] == expected, f"tokens of {arrival.name}"
    pdmux.assert_nothing_left()


@pytest.mark.parametrize("layers", [1, 3, 1000])
@pytest.mark.parametrize("chunk", [50, 256])
def test_the_real_runner(real_engines, layers, chunk):
    arrivals = [*chats(), late(), late("same", step=9), late("short", 3, 9, 4), late("burst", 60, 9, 5)]
    assert_same_as_one_at_a_time(real_engines, arrivals, layers, chunk)
    steps = real_engines[1].lane_steps()
    assert max(step.decode_batch for step in steps) >= 3, "no layers ran beside a decode step"


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"seed": 5, "temperature": 0.9},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_sampling_that_depends_on_what_was_said(real_engines, sampling):
    """The tokens that only the device knows follow a request from one lane to the other."""
    arrivals = [replace(arrival, sampling=sampling) for arrival in [*chats(), late(), late("burst", 60, 9, 5)]]
    assert_same_as_one_at_a_time(real_engines, arrivals, 1, 256)


def test_the_real_runner_when_the_kv_cache_is_small(real_engines):
    arrivals = [Arrival(f"r{i}", prompt(20 + 9 * i % 60, i), 110, step=i) for i in range(8)]
    assert_same_as_one_at_a_time(real_engines, arrivals, 1, 256)


# --- random schedules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One request of a schedule."""

    shared_blocks: int  # of a prefix that all prompts share
    own_tokens: int
    content: int  # prompts of equal lengths and content are equal
    max_tokens: int
    stop_at: int | None  # the token of its answer that stops it
    step: int
    abort: int | None  # the step after which it is aborted
    abort_in_flight: bool  # the engine hears of it in its next update, not between two steps

    def arrivals(self, name: str) -> list[Arrival]:
        tokens = [*prompt(self.shared_blocks * BLOCK, 1), *prompt(self.own_tokens, 100 + self.content)]
        stop = [] if self.stop_at is None else [answer(tokens, self.stop_at + 1)[-1]]
        return [Arrival(name, tokens, self.max_tokens, self.step, stop)]

    def answer(self) -> list[int]:
        return self.arrivals("")[0].answer


CHAT = Plan(0, 20, 9, 70, None, 0, None, False)  # decodes while the others arrive


@dataclass(frozen=True)
class SessionPlan:
    """A session of a schedule."""

    turns: list[tuple[int, int, int]]  # prompt tokens, max_tokens, steps to the next turn or to the end
    content: int
    step: int
    abort: int | None
    abort_in_flight: bool

    def arrivals(self, name: str) -> list[Arrival]:
        arrivals, step = [], self.step
        for number, (length, max_tokens, gap) in enumerate(self.turns):
            tokens = prompt(length, 200 + 10 * number + self.content)
            arrivals.append(Arrival(name, tokens, max_tokens, step, resumable=True))
            step += gap
        return [*arrivals, Arrival(name, [0], step=step)]

    def answer(self) -> list[int]:
        return session_answer(self.arrivals("")[:-1])


@dataclass(frozen=True)
class Schedule:
    """What happens to an engine."""

    plans: list[Plan]
    sessions: list[SessionPlan]
    layers: int
    fused: tuple[int, int] | None  # of FUSED
    chunk: int
    report_delay: int
    batches: int  # in the lane at most
    max_active: int
    disturbances: dict[int, Callable]  # by the step after which they happen

    @property
    def named(self) -> dict[str, Plan | SessionPlan]:
        return {"chat": CHAT, **{f"r{i}": plan for i, plan in enumerate([*self.plans, *self.sessions])}}


def resume(engine):
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.give_blocks_back()


def nothing(engine):
    pass


some_step = st.sampled_from([0, 0, 4, 5, 5, 6, 8, 8, 9, 10]) | st.integers(0, 40)  # often in the lane together


@st.composite
def some_plan(draw, max_prompt, max_tokens):
    shared = draw(st.integers(0, (max_prompt - 1) // BLOCK))
    step = draw(some_step)
    return Plan(
        shared_blocks=shared,
        own_tokens=draw(st.integers(1, max_prompt - shared * BLOCK)),
        content=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, max_tokens)),
        stop_at=draw(st.none() | st.integers(0, 10)),
        step=step,
        abort=draw(st.none() | st.integers(step, step + 15)),
        abort_in_flight=draw(st.booleans()),
    )


@st.composite
def some_session(draw):
    step = draw(some_step)
    return SessionPlan(
        turns=draw(
            st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=3)
        ),
        content=draw(st.integers(0, 2)),
        step=step,
        abort=draw(st.none() | st.none() | st.none() | st.integers(step, step + 60)),
        abort_in_flight=draw(st.booleans()),
    )


def some_schedule():
    """Many requests in a small KV cache, or sessions and requests that fit in it.

    For stock vLLM forgets a session whose turn ends while the session is preempted: that ends the turn a second time.
    """
    crowd = st.lists(some_plan(220, 120), min_size=2, max_size=8)
    return schedules_of(crowd, st.just([])) | schedules_of(
        st.lists(some_plan(60, 36), max_size=1), st.lists(some_session(), min_size=1, max_size=2)
    )


def schedules_of(plans, sessions):
    return st.builds(
        Schedule,
        plans=plans,
        sessions=sessions,
        layers=st.sampled_from([1, 1, 2, 3, 7, 1000]),
        fused=st.sampled_from(FUSED),
        chunk=st.sampled_from([16, 50, 256]),
        report_delay=st.integers(0, 2),
        batches=st.integers(1, 2),
        max_active=st.sampled_from([16, 16, 16, 16, 3, 2, 1]),
        disturbances=st.dictionaries(
            st.sampled_from(range(6, 24)) | st.integers(1, 60),
            st.sampled_from([preempt_last, squeeze, squeeze, reset, pause, pause_for_new_weights, pause_new]),
            max_size=6,
        ),
    )


class Script:
    """A hook that aborts and disturbs at the steps that the schedule names."""

    PAUSE_STEPS = 8

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __call__(self, engine):
        step = engine.step_number
        for name, plan in self.schedule.named.items():
            if plan.abort == step:
                engine.abort(name, plan.abort_in_flight)
        self.schedule.disturbances.get(step, nothing)(engine)
        if step - self.PAUSE_STEPS in self.schedule.disturbances:
            resume(engine)


class LaneWatch(Watch):
    """Checks each step from where the lane stands."""

    def __init__(self, engine):
        super().__init__(engine.scheduler)
        self.engine = engine
        self.stands = (-1, 0)  # the batch in the lane, and the layer where it stands
        self.idle_steps = 0

    def check_step(self):
        for request in self.scheduler.requests.values():
            assert request.num_output_placeholders >= 0
            assert 0 <= request.num_stale_output_tokens <= request.num_in_flight_tokens
        super().check_step()

    def check_lanes(self, output):
        order, lane = order_of(output), self.engine.worker._prefill_lane
        if order.batch_id is not None and lane._current is not None:
            stands = (lane._current.id, lane._lane.layer)
            assert stands > self.stands, "the lane stood still"
            self.stands = stands
        busy = output.total_num_scheduled_tokens > 0 or order.batch_id is not None
        has_work = self.scheduler.has_unfinished_requests()
        waits = self.scheduler.num_waiting_for_streaming_input > 0 or self.engine.taken
        self.idle_steps = self.idle_steps + 1 if has_work and not busy and not waits else 0
        assert self.idle_steps <= self.engine.core.batch_queue_size, "no lane does anything"


def check_schedule(engine, schedule, watch):
    arrivals = [arrival for name, plan in schedule.named.items() for arrival in plan.arrivals(name)]
    script = Script(schedule)

    def after_step(engine):
        watch()
        script(engine)

    engine.scheduler.max_num_active_reqs = schedule.max_active
    try:
        got = engine.run(arrivals, after_step)
        for name, plan in schedule.named.items():
            expected = plan.answer() if plan.abort is None else plan.answer()[: len(got[name])]
            assert got[name] == expected, f"tokens of {name}"
    finally:
        engine.scheduler.max_num_active_reqs = ENGINE["max_num_seqs"]
        resume(engine)
    engine.assert_nothing_left()


random_schedules = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("use_v2", [False, True], ids=["V1", "V2"])
@random_schedules
@given(schedule=some_schedule())
def test_any_schedule(engines, use_v2, schedule):
    with engines.lend(True, use_v2) as engine:
        batches = schedule.batches if use_v2 else 1
        engine.fresh(schedule.layers, schedule.chunk, schedule.report_delay, batches)
        fuse_now_and_then(engine.scheduler, schedule.fused)
        with LaneWatch(engine) as watch:
            check_schedule(engine, schedule, watch.check_step)


@pytest.mark.parametrize("use_v2", [False, True], ids=["V1", "V2"])
@random_schedules
@given(schedule=some_schedule())
def test_stock_gives_the_same_answers(engines, use_v2, schedule):
    """What proves that the stand-ins are faithful: stock's asynchronous scheduler is at ease with them."""
    with engines.lend(False, use_v2) as engine:
        check_schedule(engine.fresh(chunk=schedule.chunk), schedule, lambda: None)
