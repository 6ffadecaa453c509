# SPDX-License-Identifier: Apache-2.0
"""What the policy is asked and told, to the number, in schedules of a few steps on a virtual GPU (model_check.py).

A decode step takes 4 ms and a layer 1 ms of a clock that nothing else moves, and a prompt's token costs twice as much
behind 100 others. So every number here can be worked out by hand.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from model_check import Checked, Plan, Schedule

from vllm_pdmux.loads import Loads
from vllm_pdmux.messages import LaneReport, Run
from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import ALL_LAYERS, MOST_WAITING, Decision, Kind, Load, Prompt, PromptWork
from vllm_pdmux.policy.types import Unlearning

LAYERS = 8
CHAT = Plan(own_tokens=10, max_tokens=30)
LONG = Plan(own_tokens=40, max_tokens=5, step=3)  # its first block, 8 tokens, is the chat's
LATE = Plan(own_tokens=16, max_tokens=5, step=5, content=1)


class Notes(Unlearning):
    """A policy that notes all that it is asked and told, in order."""

    observes = fuses = True

    def __init__(self, layers, fused, overtakes):
        self._layers, self._fused, self._overtakes = layers, fused, overtakes
        self.decided, self.fused, self.prompts, self.seen = [], [], [], []

    def decide(self, load):
        self.decided.append(rounded(load))
        return Decision(1, self._layers if load.decode_batch else ALL_LAYERS)

    def fused_tokens(self, load):
        self.fused.append(rounded(load))
        return self._fused

    def overtakes(self, waiting, begun):
        self.prompts.append((rounded(waiting), rounded(begun)))
        return self._overtakes

    def observe(self, step):
        self.seen.append(rounded(step))


def rounded(value):
    """Without the last digits of a clock that is at 1000 s."""
    if isinstance(value, (Load, Prompt)) or hasattr(value, "step_ms"):
        return replace(value, **{name: rounded(one) for name, one in vars(value).items()})
    if isinstance(value, tuple):
        return tuple(rounded(one) for one in value)
    return round(value, 6) if isinstance(value, float) else value


def schedule(*plans, **options):
    slow = {"decode_ms": (4.0,), "layer_ms": (1.0,), "host_ms": 0.0}
    return Schedule(plans=plans, **{"chunk": 20, "has_gpu": False, "use_v2": True, "kv_blocks": 64, **slow, **options})


@contextmanager
def noted(lab, what, layers=4, fused=0, overtakes=False):
    """A run of a schedule under such a policy."""
    with lab.lend(what) as parts:
        run = Checked(lab, what, *parts)
        notes, scheduler = Notes(layers, fused, overtakes), run.scheduler
        scheduler._pdmux_policy, scheduler._prompt_work = notes, PromptWork(100)
        scheduler._observer = Observer(notes, scheduler._prompt_work)
        yield run, notes


def notes_of(lab, *arguments, **options):
    with noted(lab, *arguments, **options) as (run, notes):
        run.run()
        run.check_answers()
        return notes


def decided(decode_batch, tokens, context, work, wait_ms, waiting, *first_tokens):
    """What `decide` is asked of a step with a batch in the lane."""
    return Load(
        decode_batch,
        tokens,
        LAYERS,
        context,
        work,
        oldest_wait_ms=wait_ms,
        waiting_work=waiting,
        first_tokens=first_tokens,
        is_lane_busy=True,
    )


def asked(decode_batch, context, computed, wait_ms, waiting, *first_tokens, chunk=20, is_lane_busy=False):
    """What `fused_tokens` is asked: of a whole step of stock vLLM's."""
    return Load(
        decode_batch, chunk, LAYERS, context, 0.0, computed, wait_ms, waiting, first_tokens, is_lane_busy=is_lane_busy
    )


def test_the_load_of_every_step_beside_prefill(lab):
    """LONG comes in two chunks, of 20 tokens behind 8 and of 12 behind 28; LATE goes between them. Their work is
    20 * 1.18, 12 * 1.34 and 16 * 1.08."""
    notes = notes_of(lab, schedule(CHAT, LONG, LATE), overtakes=True)
    assert notes.decided == [
        decided(1, 20, 13, 23.6, 0.0, 16.08, (39.68, 0.0)),
        decided(1, 20, 14, 23.6, 4.0, 16.08, (27.88, 4.0)),  # a half of the first chunk's layers is done
        decided(1, 16, 15, 17.28, 16.0, 16.08, (17.28, 0.0), (33.36, 16.0)),
        decided(1, 16, 16, 17.28, 20.0, 16.08, (8.64, 4.0), (24.72, 20.0)),
        decided(2, 12, 34, 16.08, 32.0, 0.0, (16.08, 32.0)),
        decided(2, 12, 36, 16.08, 36.0, 0.0, (8.04, 36.0)),
    ]


def test_the_load_by_which_steps_are_fused_or_not_before_each_batch(lab):
    """Before it is known what of LONG the prefix cache has it counts whole: 40 * 1.2."""
    notes = notes_of(lab, schedule(CHAT, LONG, LATE), overtakes=True)
    assert notes.fused == [
        asked(1, 12, 0, 0.0, 48.0, (48.0, 0.0)),
        asked(1, 14, 28, 16.0, 33.36, (16.08, 16.0), (33.36, 0.0)),
        asked(2, 32, 28, 32.0, 16.08, (16.08, 32.0)),
    ]


def test_the_load_by_which_steps_are_fused_or_not_beside_a_batch(lab):
    """On a GPU, where LATE may enter the lane behind LONG, which does not decode yet."""
    late = replace(LATE, step=4)
    notes = notes_of(lab, schedule(CHAT, LONG, late, has_gpu=True, chunk=64), layers=2)
    assert notes.fused == [
        asked(1, 12, 0, 0.0, 48.0, (48.0, 0.0), chunk=64),
        asked(1, 13, 0, 0.0, 17.28, (29.76, 4.0), (47.04, 0.0), chunk=64, is_lane_busy=True),
    ]
    assert notes.decided[1:3] == [
        decided(1, 16, 14, 17.28, 4.0, 0.0, (47.04, 4.0), (47.04, 0.0)),
        decided(1, 16, 15, 17.28, 8.0, 0.0, (37.12, 8.0), (37.12, 4.0)),
    ]


def test_the_load_of_fused_steps_and_what_is_told_of_them(lab):
    """12 tokens of prompts in each, of LONG's 32 and then of LATE's 16."""
    notes = notes_of(lab, schedule(CHAT, LONG, LATE), fused=12)
    assert notes.decided == [] and notes.fused == [
        asked(1, 12, 0, 0.0, 48.0, (48.0, 0.0)),
        asked(1, 13, 20, 4.0, 26.0, (26.0, 4.0)),
        asked(1, 14, 32, 8.0, 28.16, (10.88, 8.0), (28.16, 0.0)),
        asked(2, 55, 4, 4.0, 13.2, (13.2, 4.0)),
    ]
    told = [(one.decode_batch, one.context_tokens, one.prefill_work) for one in notes.seen if one.kind is Kind.FUSED]
    assert told == [(1, 13, 13.68), (1, 14, 15.12), (1, 15, 14.96), (2, 57, 13.2)]
    assert {(one.step_ms, one.group) for one in notes.seen if one.kind is Kind.FUSED} == {(4.0, 0)}


def test_what_is_told_of_steps_beside_prefill(lab):
    """The work of the layers that ran, half a batch's in each step; a batch's last step waits for its eight layers."""
    notes = notes_of(lab, schedule(CHAT, LONG, LATE), overtakes=True)
    told = [vars(one) for one in notes.seen if one.kind is Kind.BESIDE]
    assert [(one["step_ms"], one["decode_batch"], one["context_tokens"], one["prefill_work"]) for one in told] == [
        (4.0, 1, 13, 11.8),
        (12.0, 1, 14, 11.8),
        (4.0, 1, 15, 8.64),
        (12.0, 1, 16, 8.64),
        (4.0, 2, 34, 8.04),
        (12.0, 2, 36, 8.04),
    ]
    assert {one["group"] for one in told} == {1}
    assert notes.seen[0] == replace(notes.seen[0], kind=Kind.PREFILL, step_ms=4.0, decode_batch=0, prefill_work=10.5)


def test_a_prompt_with_two_chunks_in_the_lane_has_one_first_token(lab):
    with noted(lab, schedule(CHAT, LONG, has_gpu=True), layers=2) as (run, notes):
        while [list(batch.requests) for batch in run.scheduler._batches] != [["r1"], ["r1"]]:
            run.one_step()
        assert not run.scheduler.requests["r1"].is_prefill_chunk
        run.one_step()
        assert len(notes.decided[-1].first_tokens) == 1
        run.run()


def test_with_nothing_decoding_those_count_that_will(lab):
    """The chat is gone when half of LONG's first chunk has run."""
    notes = notes_of(lab, schedule(replace(CHAT, abort=4), LONG), layers=4)
    assert notes.decided[1] == decided(1, 20, 28, 23.6, 4.0, 16.08, (27.88, 4.0))


def test_a_policy_that_does_not_learn_is_asked_by_the_sizes_alone(lab):
    with noted(lab, schedule(CHAT, LONG, LATE)) as (run, notes):
        run.scheduler._observer = None
        run.run()
    assert notes.decided[0] == Load(1, 20, LAYERS, 0, 23.6, is_lane_busy=True)
    assert not notes.prompts and not notes.seen


def test_what_may_overtake_a_prompt_that_is_half_done(lab):
    """The first that waits, or another that is half done; never twice in succession."""
    long, other = replace(LONG, own_tokens=100), replace(LATE, own_tokens=60)
    notes = notes_of(lab, schedule(CHAT, long, other, replace(LATE, content=2, step=7)), overtakes=True)
    assert notes.prompts[:3] == [
        (Prompt(78.0, 0.0), Prompt(118.08, 16.0)),  # 60 * 1.3 and 72 * 1.64
        (Prompt(56.0, 32.0), Prompt(90.48, 48.0)),  # both have had 20 tokens more: 40 * 1.4 and 52 * 1.74
        (Prompt(30.0, 64.0), Prompt(58.88, 80.0)),  # 20 * 1.5 and 32 * 1.84
    ]


def test_all_that_may_overtake_are_asked_for(lab):
    """First the others that are half done, then the first that waits."""
    long, other, late = replace(LONG, own_tokens=100), replace(LATE, own_tokens=60), replace(LATE, content=2, step=7)
    with noted(lab, schedule(CHAT, long, other, late), overtakes=True) as (run, notes):
        while len(notes.prompts) < 1:
            run.one_step()
        notes._overtakes = False
        run.run()
    of_others = [waiting.work for waiting, begun in notes.prompts if begun == notes.prompts[1][1]]
    assert len(of_others) == 2 and of_others[1] == 17.28


def test_the_first_batch_may_leave_out_what_fused_steps_have_begun(lab):
    with noted(lab, schedule(CHAT, LONG, LATE), fused=12, overtakes=True) as (run, notes):
        while run.step < 5:
            run.one_step()
        notes._fused = 0
        run.one_step()
        assert notes.prompts == [(Prompt(17.28, 0.0), Prompt(10.88, 8.0))]  # 8 * 1.36
        assert [list(batch.requests) for batch in run.scheduler._batches] == [["r2"]]
        run.run()
        run.check_answers()


def test_with_priorities_nothing_overtakes(lab):
    notes = notes_of(lab, schedule(CHAT, LONG, LATE, has_priorities=True), overtakes=True)
    assert notes.decided and notes.prompts == []


MANY = [Plan(own_tokens=8, max_tokens=1, step=3, content=10 + number) for number in range(MOST_WAITING + 5)]


def test_of_many_prompts_that_wait_the_first_are_counted(lab):
    with noted(lab, schedule(CHAT, *MANY)) as (run, notes):
        while not notes.fused:
            run.one_step()
        (load,) = notes.fused
        run.run()
    assert load.waiting_work == pytest.approx(MOST_WAITING * 8 * 1.04) and len(load.first_tokens) == MOST_WAITING


def wanting(plans, number):
    """With one of them that wants prompt logprobs."""
    return [replace(one, wants_prompt_logprobs=i == number) for i, one in enumerate(plans)]


@pytest.mark.parametrize("number, is_fused", [(0, False), (MOST_WAITING - 1, False), (MOST_WAITING, True)])
def test_no_step_is_fused_while_one_of_the_first_prompts_that_wait_wants_prompt_logprobs(lab, number, is_fused):
    """Those must be gathered where they begin. The last ones have no part in the step."""
    with noted(lab, schedule(CHAT, *wanting(MANY, number)), fused=12) as (run, notes):
        for _ in range(4):
            run.one_step()
        assert bool(notes.fused) == is_fused and bool(notes.decided) == (not is_fused)
        run.run()
        run.check_answers()


def test_the_work_of_a_step_is_that_of_all_batches_that_ran_in_it():
    loads, batches = Loads(), {3: SimpleNamespace(work=80.0), 4: SimpleNamespace(work=160.0)}
    loads._batch, loads._model_layers = batches.get, LAYERS
    gone = Run(2, 0, 8)  # dropped meanwhile
    assert loads._work_through(LaneReport(3, (gone, Run(3, 6, 8), Run(4, 0, 1)))) == 80.0 * 2 / 8 + 160.0 / 8
    assert loads._work_through(None) == 0.0


def test_what_is_left_in_the_lane_is_that_of_layers_that_are_not_known_to_have_run():
    loads = Loads()
    loads._batches, loads._model_layers = deque(), LAYERS
    assert loads._lane_work() == 0.0
    for work, layers in ((80.0, 6), (160.0, 0)):
        loads._batches.append(SimpleNamespace(work=work, layers_launched=layers))
    assert loads._lane_work() == 20.0 + 160.0
