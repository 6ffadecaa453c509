# SPDX-License-Identifier: Apache-2.0
"""The slo policy in a real engine: it is told of every step, decides, and changes no token."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny_model
from driver import ENGINE, Arrival, prompt
from tokens import assert_same
from vllm import SamplingParams

from vllm_pdmux.loads import Loads
from vllm_pdmux.messages import PrefillOrder
from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import Kind, Mix, OffPolicy, PromptWork, SloPolicy
from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.table import TablePolicy
from vllm_pdmux.policy.target import Target
from vllm_pdmux.step_times import StepTime

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def arrivals():
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY) for i in range(3)]
    return [*chats, *(Arrival(f"long{i}", prompt(150 + 30 * i, 100 + i), GREEDY, 8 + 9 * i) for i in range(3))]


@pytest.fixture(scope="module")
def slo_engine(start_engine, tiny_model_path):
    return start_engine(tiny_model_path, pdmux={"itl_slo_ms": 1000.0})


@pytest.fixture
def slo(slo_engine):
    """The engine with a policy that has seen nothing."""
    slo_engine.settle()
    assert slo_engine.scheduler.reset_prefix_cache()
    slo_engine.scheduler.pdmux_trace.clear()
    yield slo_engine
    slo_engine.assert_nothing_left()


class Spy:
    """A policy that notes what it is told."""

    observes = fuses = True

    def __init__(self, layers=2, fused=0):
        self._table = TablePolicy((), 6, 36, LayerRule(layers_per_group=layers))
        self._fused = fused
        self.seen, self.loads = [], []

    def decide(self, load):
        self.loads.append(load)
        return self._table.decide(load)

    def fused_tokens(self, load):
        self.loads.append(load)
        return self._fused

    def overtakes(self, waiting, begun):
        return waiting.work < begun.work

    def observe(self, step):
        self.seen.append(step)


def use(driver, policy):
    scheduler = driver.scheduler
    scheduler._prompt_work = PromptWork()  # tokens as they are
    scheduler._pdmux_policy, scheduler._observer = policy, Observer(policy, PromptWork())
    return policy


def test_a_target_makes_the_policy_and_tokens_are_stocks(slo, stock):
    policy = slo.scheduler._pdmux_policy
    assert isinstance(policy, SloPolicy)
    assert_same(slo.run(arrivals()), stock.run(arrivals()))
    assert policy._alone.is_known and policy._full_rate.value
    assert sum(step.batch_ended for step in slo.scheduler.pdmux_trace.steps) >= 3


def test_a_target_that_cannot_be_met_changes_no_token_and_starves_no_prompt(slo, stock):
    use(slo, SloPolicy(slo.scheduler._pdmux_policy._shares, Impossible(), Known(), False, print))
    assert_same(slo.run(arrivals()), stock.run(arrivals()))
    steps = [step for step in slo.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]
    assert {step.end_layer - step.first_layer for step in steps} == {1}  # one layer a step, and every step one


class Impossible(Target):
    """Half of what decode takes alone."""

    def of(self, alone_ms, wait_ms=0.0):
        return alone_ms / 2


class Known:
    """Decode steps of which all is known."""

    is_known = True

    def ms(self, decode_batch, context_tokens):
        return 10.0

    def mix(self, decode_batch, context_tokens):
        return Mix(1.0, 0.0, 0.0)

    def add(self, *args):
        pass


def test_every_step_is_told_for_what_it_was(slo):
    spy = use(slo, Spy())
    slo.run(arrivals())
    kinds = {kind: [step for step in spy.seen if step.kind is kind] for kind in Kind}
    assert kinds[Kind.DECODE] and kinds[Kind.PREFILL] and kinds[Kind.BESIDE] and not kinds[Kind.FUSED]
    assert all(step.step_ms > 0 for step in spy.seen)
    assert all(step.decode_batch and step.context_tokens >= 20 * step.decode_batch for step in kinds[Kind.DECODE])
    assert sum(step.prefill_work for step in kinds[Kind.BESIDE]) == pytest.approx(150 + 180 + 210)
    assert {step.group for step in kinds[Kind.BESIDE]} == {1}
    assert sum(step.prefill_work for step in kinds[Kind.PREFILL]) == 20 + 27 + 34


def test_the_load_has_the_context_of_the_decoding_requests(slo):
    spy = use(slo, Spy())
    slo.run([Arrival("chat", prompt(50, 1), GREEDY), Arrival("long", prompt(200, 2), GREEDY, 10)])
    contexts = [load.context_tokens for load in spy.loads if load.decode_batch == 1]
    assert contexts and all(50 < tokens < 50 + 40 + 2 for tokens in contexts)
    assert contexts == sorted(contexts)


def test_the_load_has_the_wait_of_the_oldest_request_without_a_token(slo):
    spy = use(slo, Spy())
    slo.run([Arrival("chat", prompt(50, 1), GREEDY), Arrival("long", prompt(200, 2), GREEDY, 10)])
    waits = [load.oldest_wait_ms for load in spy.loads if load.prefill_tokens and load.decode_batch]
    assert waits[0] > 0 and waits == sorted(waits), "the long prompt waits, the chat has its first token"


def test_the_load_has_the_work_that_is_left_in_the_lane_and_outside_of_it(slo):
    """A prompt of three chunks, of which one is in the lane at a time, and a prompt that comes later."""
    spy = use(slo, Spy(layers=1))
    slo.set_chunk(70)
    try:
        later = Arrival("later", prompt(30, 3), GREEDY, 11)
        slo.run([Arrival("chat", prompt(50, 1), GREEDY), Arrival("long", prompt(200, 2), GREEDY, 10), later])
    finally:
        slo.set_chunk(ENGINE["max_num_batched_tokens"])
    beside = [load for load in spy.loads if load.prefill_tokens and load.decode_batch and load.waiting_work]
    layers = beside[0].model_layers
    in_lane = [load.first_tokens[-1][0] - load.waiting_work for load in beside]
    assert all(-1e-6 <= work <= 70 for work in in_lane) and {70.0, 70 - 70 / layers} <= {round(w, 6) for w in in_lane}
    totals = [load.first_tokens[-1][0] for load in beside]
    added = [after - before for before, after in pairwise(totals) if after > before + 1e-6]
    assert totals[0] == 200 and len(added) == 1 and 0 < added[0] <= 30, "less with every layer, and once a prompt more"
    both = next(load for load in beside if load.waiting_work == 160)
    (long, long_wait_ms), (later, later_wait_ms) = both.first_tokens
    assert later == pytest.approx(long + 30) and 0 < later_wait_ms < long_wait_ms == pytest.approx(
        both.oldest_wait_ms, abs=50
    )


@pytest.mark.parametrize("tokens", [16, 100, 10_000])
def test_fused_steps_are_stocks_own_with_so_many_tokens(slo, stock, tokens):
    spy = use(slo, Spy(fused=tokens))
    assert_same(slo.run(arrivals()), stock.run(arrivals()))
    fused = [step for step in spy.seen if step.kind is Kind.FUSED]
    assert fused and max(step.prefill_work for step in fused) <= tokens
    assert not [step for step in spy.seen if step.kind is Kind.BESIDE]


@pytest.mark.parametrize("overtakes", [False, True])
def test_a_short_prompt_overtakes_a_long_one_between_two_of_its_chunks(slo, stock, overtakes):
    spy = use(slo, Spy(layers=1000))
    if not overtakes:
        spy.overtakes = lambda waiting, begun: False
    chat = Arrival("chat", prompt(20, 1), SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    served = [chat, Arrival("long", prompt(300, 2), short, 5), Arrival("short", prompt(30, 3), short, 10)]
    ended = {}

    def watch(driver):
        for name in ("long", "short"):
            if driver.step_number > 12 and not driver.internal_ids(name):
                ended.setdefault(name, driver.step_number)

    slo.set_chunk(32)
    try:
        got = slo.run(served, watch)
    finally:
        slo.set_chunk(ENGINE["max_num_batched_tokens"])
    assert_same(got, stock.run(served))
    assert (ended["short"] < ended["long"]) == overtakes


def test_in_a_fused_step_all_that_decode_have_a_token_though_a_prompt_is_half_done(slo, stock):
    """One that has overtaken it comes behind it in the queue of what runs, where stock would have no token left."""
    spy = use(slo, Spy(layers=1000))
    answer = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    served = [
        Arrival("chat", prompt(20, 1), answer),
        Arrival("long", prompt(400, 2), answer, 5),
        Arrival("short", prompt(30, 3), answer, 8),
    ]
    scheduler, fused, left_out = slo.scheduler, [], []
    schedule = scheduler.schedule

    def watched(*args):
        if scheduler.running and any(one.request_id.startswith("short") for one in scheduler.running):
            spy._fused = 0 if scheduler._batches else 24
        output = schedule(*args)
        scheduled = output.num_scheduled_tokens
        if max(scheduled.values(), default=0) > 1 and len(scheduled) > 1:
            fused.append(scheduled)
            decoding = [one for one in scheduler.running if one.num_output_tokens]
            left_out.extend(one.request_id for one in decoding if one.request_id not in scheduled)
        return output

    slo.set_chunk(32)
    scheduler.schedule = watched
    try:
        got = slo.run(served)
    finally:
        del scheduler.schedule
        slo.set_chunk(ENGINE["max_num_batched_tokens"])
    assert_same(got, stock.run(served))
    assert len(fused) > 3 and not left_out


def test_nobody_is_overtaken_twice_in_succession(slo):
    use(slo, Spy(layers=1000))
    chat = Arrival("chat", prompt(20, 1), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    shorts = [Arrival(f"short{i}", prompt(30, 10 + i), short, 8 + i) for i in range(30)]
    batches, begin = [], slo.scheduler._begin_batch

    def begin_and_note():
        batch, preempted = begin()
        batches.append(batch)
        return batch, preempted

    slo.scheduler._begin_batch = begin_and_note
    slo.set_chunk(32)
    try:
        slo.run([chat, Arrival("long", prompt(300, 2), short, 5), *shorts])
    finally:
        slo.set_chunk(ENGINE["max_num_batched_tokens"])
        del slo.scheduler._begin_batch
    of_long = ["long" in "".join(batch.requests) for batch in batches]
    until = max(i for i, is_long in enumerate(of_long) if is_long)
    pairs = list(pairwise(of_long[:until]))
    assert (True, False) in pairs and (False, False) not in pairs


def test_off_is_stock_vllm_through_the_plugin(slo, stock):
    slo.scheduler._pdmux_policy, slo.scheduler._observer = OffPolicy(6), None
    assert_same(slo.run(arrivals()), stock.run(arrivals()))
    steps = slo.scheduler.pdmux_trace.steps
    assert steps and not any(step.batch_id is not None or step.end_layer for step in steps)


def test_a_preempted_request_at_the_head_of_the_queue_hides_no_prompt_behind_it():
    now_s = time.time()
    preempted = SimpleNamespace(arrival_time=now_s - 1, num_output_tokens=5)
    starving = SimpleNamespace(arrival_time=now_s - 60, num_output_tokens=0)
    loads = Loads()
    loads.waiting, loads.running = [preempted, starving], []
    assert loads._oldest_wait_ms([]) > 50_000
    loads.waiting = [preempted]
    assert loads._oldest_wait_ms([]) == 0.0
    overtaken = SimpleNamespace(arrival_time=now_s - 30, num_output_tokens=0, is_prefill_chunk=True)
    loads.running = [overtaken]
    assert loads._oldest_wait_ms([]) > 25_000, "half done, and in no batch"


class Output:
    def __init__(self, num_scheduled_tokens):
        self.num_scheduled_tokens = num_scheduled_tokens


@pytest.mark.parametrize("is_saturated", [False, True])
def test_a_step_whose_lane_ran_dry_says_nothing(is_saturated):
    spy, output = Spy(), Output({"one": 1})
    observer = Observer(spy, PromptWork())
    observer.scheduled(output, PrefillOrder(batch_id=3, group=2), {"one": SimpleNamespace(num_computed_tokens=5)})
    observer.done(output, StepTime(1.0, 1.5), 70.0, is_saturated)
    assert [(step.kind, step.group, step.prefill_work, step.step_ms) for step in spy.seen] == [
        (Kind.BESIDE, 2, 70.0, 500.0)
    ] * is_saturated


def test_a_step_that_was_not_seen_when_it_was_scheduled_is_not_told():
    spy = Spy()
    Observer(spy, PromptWork()).done(Output({}), StepTime(1.0, 1.5), 0.0, True)
    assert spy.seen == []


def test_the_size_of_a_model_is_near_what_it_is(slo):
    from vllm_pdmux.model_size import decode_alone

    made = decode_alone(slo.llm.llm_engine.vllm_config)
    kv = 2 * 2 * tiny_model.LAYERS * tiny_model.KV_HEADS * (tiny_model.HIDDEN // tiny_model.HEADS)
    assert made._per_token == kv
