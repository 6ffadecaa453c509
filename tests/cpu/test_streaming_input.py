# SPDX-License-Identifier: Apache-2.0
"""Streaming input: a session's later turns are prefilled in the lane while others decode, and say what stock says.

vLLM sends each turn as a resumable request with the session's id. A turn that arrives early waits for the one before
it to end, so what a session says does not depend on when its turns arrive. A request that is not resumable ends it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from driver import prompt
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

SESSION = "session"


@dataclass
class Said:
    """What a session or a request has said."""

    tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # one for each turn


@dataclass(frozen=True)
class Send:
    """A request that is sent before engine step `step`."""

    name: str
    tokens: list[int]
    step: int
    max_tokens: int = 10
    resumable: bool = False

    def __call__(self, driver):
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        request = driver.engine.input_processor.process_inputs(
            self.name,
            TokensPrompt(prompt_token_ids=list(self.tokens)),
            params,
            supported_tasks=("generate",),
            resumable=self.resumable,
        )
        driver.engine.engine_core.add_request(request)


def turn(number, step, length=60, max_tokens=10):
    return Send(SESSION, prompt(length, 200 + number), step, max_tokens, resumable=True)


def end(step):
    return Send(SESSION, [0], step)


def chats(n=3, max_tokens=60):
    """Requests that decode while turns arrive."""
    return [Send(f"chat{i}", prompt(20 + 7 * i, i), 0, max_tokens) for i in range(n)]


def run(driver, sends, after_step=None):
    """Send all requests to the engine core and step until it has nothing to do; what each said."""
    pending, said = sorted(sends, key=lambda send: send.step), defaultdict(Said)
    step = 0
    while pending or driver.scheduler.has_requests():
        while pending and pending[0].step <= step:
            pending.pop(0)(driver)
        outputs, _ = driver.core.step_fn()
        for output in outputs[0].outputs if outputs else []:
            said[output.request_id].tokens += output.new_token_ids
            said[output.request_id].reasons += [str(output.finish_reason)] if output.finish_reason is not None else []
        if after_step is not None:
            after_step(driver)
        step += 1
        assert step < 1000, "not done after 1000 steps"
    return dict(said)


class Lane:
    """A hook that notes the batches the session was in, and does `action` once in the middle of one of its turns."""

    def __init__(self, at_turn=2, action=None):
        self.batches, self.at_turn, self.action, self.done = [], at_turn, action, False

    def __call__(self, driver):
        batch = next((batch for batch in driver.scheduler._batches if SESSION in batch.requests), None)
        if batch is None:
            return
        if batch.id not in self.batches:
            self.batches.append(batch.id)
        if self.action and not self.done and len(self.batches) == self.at_turn and driver.layer() == 4:
            self.done = True
            self.action(driver)


@pytest.fixture
def lane(pdmux):
    pdmux.set_layers_per_group(1)
    return Lane()


@pytest.mark.parametrize("layers", [1, 3, 1000])
def test_turns_that_wait_for_their_answers(stock, pdmux, layers):
    pdmux.set_layers_per_group(layers)
    sends = [*chats(), turn(1, 5), turn(2, 30), turn(3, 55), end(80)]
    got = run(pdmux, sends)
    assert got == run(stock, sends)
    assert len(got[SESSION].reasons) == 3
    lane_steps = [step for step in pdmux.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]
    assert len({step.batch_id for step in lane_steps}) == 3, "a turn did not go through the lane"


def test_turns_that_are_sent_ahead(stock, pdmux, lane):
    """The second arrives while the first is in the lane, the third while the first is answered."""
    sends = [*chats(), turn(1, 5), turn(2, 8), turn(3, 16), end(17)]
    got = run(pdmux, sends, lane)
    assert got == run(stock, sends)
    assert len(got[SESSION].tokens) == 30 and len(lane.batches) == 3


def test_turns_of_one_token_each(stock, pdmux, lane):
    """A turn that ends as it leaves the lane."""
    sends = [*chats(), *(turn(i, 5, length=40, max_tokens=1) for i in range(1, 4)), end(5)]
    got = run(pdmux, sends, lane)
    assert got == run(stock, sends)
    assert len(got[SESSION].tokens) == 3 and len(lane.batches) == 3


def test_turns_in_chunks(stock, pdmux, lane):
    for driver in (stock, pdmux):
        driver.set_chunk(50)
    pdmux.set_layers_per_group(3)
    sends = [*chats(max_tokens=90), turn(1, 5, length=120), turn(2, 9, length=130), end(10)]
    got = run(pdmux, sends, lane)
    assert got == run(stock, sends)
    assert len(lane.batches) >= 6


def test_a_first_turn_alone_and_the_next_beside_decodes(stock, pdmux, lane):
    """The session's state is in the engine's own runner when its second turn goes to the lane, and back again."""
    others = [Send(f"chat{i}", prompt(30, i), 14, 60) for i in range(2)]
    sends = [turn(1, 0), *others, turn(2, 20), turn(3, 100), end(140)]
    got = run(pdmux, sends, lane)
    assert got == run(stock, sends)
    assert len(lane.batches) == 1 and len(got[SESSION].tokens) == 30


def test_two_sessions_in_one_batch(stock, pdmux, lane):
    def as_other(send):
        return Send("other", send.tokens[::-1], send.step, send.max_tokens, send.resumable)

    mine = [turn(1, 5), turn(2, 30), end(60)]
    sends = [*chats(), *mine, *map(as_other, mine)]
    assert run(pdmux, sends, lane) == run(stock, sends)
    assert len(lane.batches) == 2


@pytest.mark.parametrize("when", ["in the lane", "while it is answered", "after its answer"])
def test_the_end_of_a_session(stock, pdmux, lane, when):
    sends = [*chats(), turn(1, 5), turn(2, 30)]
    last = end({"in the lane": 33, "while it is answered": 42, "after its answer": 70}[when])
    got = run(pdmux, [*sends, last], lane)
    assert got == run(stock, [*sends, last])
    assert len(lane.batches) == 2


def test_an_abort_in_the_middle_of_a_turn(stock, pdmux):
    """The session's blocks and both runners' states go; the others go on; the same tokens sent again are computed."""
    pdmux.set_layers_per_group(1)
    lane = Lane(action=lambda driver: driver.core.abort_requests([SESSION]))
    sends = [*chats(), turn(1, 5), turn(2, 30), Send("again", [*turn(1, 0).tokens, *turn(2, 0).tokens], 45)]
    got = run(pdmux, sends, lane)
    assert lane.done and SESSION not in pdmux.scheduler.requests
    expected = run(stock, [*sends, end(60)])
    assert got.pop(SESSION).tokens == expected.pop(SESSION).tokens[:10]
    assert got == expected


def test_a_reset_in_the_middle_of_a_turn(stock, pdmux):
    """The turn is preempted like all that runs, and starts again with all that was said before."""
    pdmux.set_layers_per_group(1)

    def reset(driver):
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)

    lane = Lane(action=reset)
    sends = [*chats(), turn(1, 5), turn(2, 30), turn(3, 34), end(90)]
    got = run(pdmux, sends, lane)
    assert lane.done
    assert got == run(stock, sends)


@pytest.fixture(scope="module")
def small_kv(start_engine, tiny_model_path):
    """Both engines with 20 blocks of 32 tokens."""
    return [start_engine(tiny_model_path, pdmux=p, num_gpu_blocks_override=20) for p in (None, {})]


@pytest.mark.parametrize("layers", [1, 1000])
def test_sessions_when_the_kv_cache_is_small(small_kv, layers):
    """Waiting sessions keep their blocks, so that the others are preempted, in the lane and out of it."""
    stock, pdmux = (driver.fresh() for driver in small_kv)
    pdmux.set_layers_per_group(layers)
    preempted = set()

    def watch(driver):
        preempted.update(i for i, request in driver.scheduler.requests.items() if request.num_preemptions)

    turns = [turn(1, 5, 90, 30), turn(2, 60, 60, 30), turn(3, 61, 40, 30), end(62)]
    sends = [*(Send(f"chat{i}", prompt(20 + 9 * i, i), i, 110) for i in range(6)), *turns]
    got = run(pdmux, sends, watch)
    assert got == run(stock, sends)
    assert preempted, "the cache was not small enough"
    pdmux.assert_nothing_left()
