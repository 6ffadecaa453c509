# SPDX-License-Identifier: Apache-2.0
"""How batches leave the lane, on a virtual GPU (model_check.py): what is counted, said and told to clients of each way,
and what a batch may have of the engine's seats."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from model_check import BLOCK, ROWS, Plan
from test_given_up import STUCK, give_up, stuck
from test_loads import CHAT, LATE, LONG, noted, schedule
from test_scheduler import outputs_of
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_pdmux import leaving, losing
from vllm_pdmux.entering import Entering
from vllm_pdmux.messages import order_of
from vllm_pdmux.metrics.definitions import (
    BATCHES,
    BESIDE,
    DROPPED,
    ENDED,
    FAILED,
    JOINS,
    RESULTS,
    STEPS,
    TOKENS,
    key_of,
)
from vllm_pdmux.outputs import merge_outputs, outputs_of_ended

BEHIND = schedule(CHAT, LONG, replace(LATE, step=4), has_gpu=True, chunk=64)  # LATE is in the lane behind LONG


@pytest.fixture
def said(monkeypatch):
    """What is an error in the log."""
    lines = []
    for module in (leaving, losing):
        monkeypatch.setattr(module.logger, "error", lambda text, *values: lines.append(text % values))
    return lines


def counted(run):
    """Batches by what has become of them."""
    values = run.scheduler._counters.values
    return {result: n for result in RESULTS if (n := values[key_of(BATCHES, result)])}


def both_in_lane(run):
    while len(run.scheduler._batches) < 2:
        run.one_step()


def ends(lab, what, layers=2):
    with noted(lab, what, layers=layers) as (run, _):
        run.run()
        run.check_answers()
        run.check_nothing_left()
        return run


# --- the prefix cache ------------------------------------------------------------------------------------------------

SHARED_BLOCKS = 4
HITS = schedule(
    replace(CHAT, shared_blocks=SHARED_BLOCKS), replace(LONG, shared_blocks=SHARED_BLOCKS, content=5), chunk=64
)


def aborted(run):
    run.core.abort_requests(["r1"])
    run.aborted.add(("r1", False))


def paused(run):
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    run.scheduler.set_pause_state(PauseState.UNPAUSED)


def raised(run):
    while run.scheduler._batches:
        run.one_step()
    assert counted(run) == {FAILED: 1}


def hit_tokens(run, plan):
    """How many of its prompt's tokens a request would find in the prefix cache."""
    hasher = run.core.request_block_hasher
    request = Request("asks", plan.tokens(False), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return run.scheduler.kv_cache_manager.get_computed_blocks(request)[1]


@pytest.mark.parametrize("leaves", [aborted, paused, raised])
def test_what_a_batch_has_hit_stays_in_the_prefix_cache_and_what_it_was_to_compute_goes(lab, leaves):
    with noted(lab, replace(HITS, faults={0: 5} if leaves is raised else {}), layers=2) as (run, _):
        while not run.scheduler._batches:
            run.one_step()
        assert hit_tokens(run, HITS.plans[1]) > SHARED_BLOCKS * BLOCK, "vLLM commits hashes when it allocates"
        leaves(run)
        assert hit_tokens(run, HITS.plans[1]) == SHARED_BLOCKS * BLOCK
        run.run()
        run.check_answers()
        run.check_nothing_left()


def test_so_it_does_when_the_lane_is_given_up(lab):
    with stuck(lab, replace(STUCK, plans=HITS.plans)) as (run, _):
        give_up(run)
        assert hit_tokens(run, HITS.plans[1]) == SHARED_BLOCKS * BLOCK


def test_chunks_that_have_been_through_the_lane_stay_in_the_prefix_cache(lab):
    with noted(lab, schedule(CHAT, LONG), layers=2) as (run, _):
        while not run.scheduler._batches or run.scheduler._batches[0].id == 0:
            run.one_step()
        chunk = run.scheduler._batches[0].output.num_scheduled_tokens["r1"]
        through = run.scheduler.requests["r1"].num_computed_tokens - chunk
        aborted(run)
        assert hit_tokens(run, LONG) == through // BLOCK * BLOCK > BLOCK
        run.run()
        run.check_nothing_left()


# --- counted and said ------------------------------------------------------------------------------------------------


def test_batches_that_end_are_counted_with_their_tokens_and_who_decodes_then(lab):
    """LONG's first chunk lets nobody decode, the second one comes with a half of LATE, and the other half alone."""
    run = ends(lab, schedule(CHAT, LONG, LATE))
    values = run.scheduler._counters.values
    assert counted(run) == {ENDED: 3} and values[TOKENS] == 32 + 16 and values[JOINS] == 2
    assert ends(lab, BEHIND).scheduler._counters.values[JOINS] == 2


def test_a_batch_that_raises_is_counted_and_said_and_the_one_behind_it_is_dropped(lab, said):
    run = ends(lab, replace(BEHIND, faults={0: 5}))
    assert counted(run) == {FAILED: 1, DROPPED: 1, ENDED: 1}
    assert said == ["prefill failed (Fault: at 5 of batch 0); ended with an error: r1"]


def test_a_pause_drops_all_batches_and_their_requests_wait_as_preempted_now(lab):
    with noted(lab, BEHIND, layers=2) as (run, _):
        both_in_lane(run)
        run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert counted(run) == {DROPPED: 2}
        waiting = list(run.scheduler.waiting)
        assert [request.request_id for request in waiting] == ["r1", "r2"], "in the order of their admission"
        events = [request.events[-1] for request in waiting]
        assert {(one.type, one.timestamp) for one in events} == {(EngineCoreEventType.PREEMPTED, run.gpu.now_s)}
        assert all(request.drop_stale_output for request in waiting), "what is in flight of them is of before the pause"
        run.scheduler.set_pause_state(PauseState.UNPAUSED)
        run.run()
        run.check_answers()


@pytest.mark.parametrize("what", [BEHIND, replace(BEHIND, faults={0: 5}), replace(BEHIND, events={6: "pause"})])
def test_without_statistics_batches_leave_all_the_same(lab, what):
    with noted(lab, what, layers=2) as (run, _):
        run.scheduler._counters = None
        run.run()
        run.check_answers()


def test_the_error_of_a_lane_that_is_given_up_names_all_that_end_with_it(lab, said):
    two = replace(STUCK, plans=(*STUCK.plans, replace(STUCK.plans[1], content=1)))
    with stuck(lab, two) as (run, _):
        give_up(run)
        assert said[0].endswith("ended with an error: r1, r2")


def test_a_report_of_the_lane_alone_makes_no_step_one_beside_prefill(lab):
    """That it is given up, and that it is back."""
    with stuck(lab, replace(STUCK, look_ahead=0)) as (run, stream):
        values, key = run.scheduler._counters.values, key_of(STEPS, BESIDE)
        before = values[key]
        give_up(run)
        run.gpu.now_s = stream.end_s
        run.run()
        assert values[key] == before > 0


def test_or_that_nobody_does(lab, said):
    """Its only request has been preempted, and starts again."""
    with stuck(lab) as (run, _):
        request = run.scheduler.requests["r1"]
        run.scheduler.running.remove(request)
        run.scheduler._preempt_request(request, run.gpu.now_s)
        give_up(run)
        assert said[0].endswith("ended with an error: no request") and run.ends["r1", False] == []


def test_a_step_has_one_set_of_statistics_though_a_batch_ends_in_it(lab, monkeypatch):
    made, stock = [], StockScheduler.make_stats

    def noting(self, *arguments, **options):
        made.append(stock(self, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(StockScheduler, "make_stats", noting)
    with noted(lab, schedule(CHAT, LONG)) as (run, _):
        update, of_steps = run.scheduler.update_from_output, []
        run.scheduler.update_from_output = lambda *given: of_steps.append(update(*given)) or of_steps[-1]
        run.run()
    assert [outputs[0].scheduler_stats for outputs in of_steps if outputs] == [one for one in made if one is not None]
    assert len(made) == len(of_steps) and None not in made


def test_what_the_statistics_are_made_of_is_passed_on(lab, monkeypatch):
    with lab.lend(schedule(CHAT)) as (_, scheduler, _):
        monkeypatch.setattr(StockScheduler, "make_stats", lambda self, *given, **named: (given, named))
        assert scheduler.make_stats(1, other=2) == ((1,), {"other": 2})


@pytest.mark.parametrize("arguments", [(True, False), (False, True)])
def test_what_is_to_be_reset_beside_the_prefix_cache_is_passed_on(lab, monkeypatch, arguments):
    with lab.lend(schedule(CHAT)) as (_, scheduler, _):
        asked = []
        monkeypatch.setattr(StockScheduler, "reset_prefix_cache", lambda self, *given: asked.append(given) or True)
        assert scheduler.reset_prefix_cache(*arguments) and asked == [arguments]


def test_clients_have_the_events_and_trace_of_a_request_that_ended_with_an_error():
    def request(name, client):
        return SimpleNamespace(
            request_id=name,
            client_index=client,
            get_finished_reason=lambda: FinishReason.ERROR,
            take_events=lambda: [f"events of {name}"],
            trace_headers={"traceparent": name},
        )

    told = outputs_of_ended([request("a", 0), request("b", 1), request("c", 0)])
    assert {client: [one.request_id for one in outputs.outputs] for client, outputs in told.items()} == {
        0: ["a", "c"],
        1: ["b"],
    }
    for one in (*told[0].outputs, *told[1].outputs):
        assert one.new_token_ids == [] and one.finish_reason == FinishReason.ERROR
        assert (one.events, one.trace_headers) == ([f"events of {one.request_id}"], {"traceparent": one.request_id})


def test_of_two_updates_of_a_step_clients_get_all_in_order():
    """Statistics are those of the first one, and what has finished is of both."""

    def update(**finished):
        made = {}
        for client, ids in finished.items():
            made[int(client[1:])] = EngineCoreOutputs(outputs=[f"{client} {one}" for one in ids])
        return made

    first, others = update(c0=["a"], c1=["b"]), update(c1=["c"], c2=["d"])
    first[0].finished_requests, first[1].finished_requests = {"a"}, {"b"}
    others[1].finished_requests = {"c"}
    merged = merge_outputs(first, others)
    assert merged is first and sorted(merged) == [0, 1, 2]
    assert [merged[client].outputs for client in (0, 1, 2)] == [["c0 a"], ["c1 c", "c1 b"], ["c2 d"]]
    assert [merged[client].finished_requests for client in (0, 1, 2)] == [{"a"}, {"b", "c"}, None]
    assert merge_outputs({}, {0: others[1]})[0].finished_requests == {"c"}


# --- seats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chats, admitted", [(ROWS, 0), (ROWS - 1, 1), (ROWS - 2, 2)])
def test_the_lane_takes_as_many_as_there_are_seats_beside_those_that_decode(lab, chats, admitted):
    several = [replace(CHAT, content=number) for number in range(chats)]
    late = [Plan(own_tokens=10, max_tokens=3, step=4, content=10 + number) for number in range(3)]
    with noted(lab, schedule(*several, *late, chunk=256)) as (run, _):
        while run.step < 4:
            run.one_step()
        outputs = outputs_of(run)
        run.one_step()
        start = order_of(outputs[0]).start
        assert (len(start.num_scheduled_tokens) if start is not None else 0) == admitted
        run.run()
        run.check_answers()


def test_who_comes_with_the_id_of_one_that_is_in_the_lane_enters_when_that_has_left_it(lab):
    """The worker knows requests by their ids. The batch goes on for LATE, and there would be room for a second one."""
    again = replace(LONG, abort=5, is_sent_again=True)
    what = schedule(CHAT, again, replace(LATE, step=3), has_gpu=True, chunk=64, layer_ms=(0.0,))
    with noted(lab, what, layers=1) as (run, _):
        outputs = outputs_of(run)
        run.run()
        run.check_answers()
    orders = [order_of(output) for output in outputs]
    begun = [place for place, order in enumerate(orders) if order.start is not None]
    assert [list(orders[place].start.num_scheduled_tokens) for place in begun] == [["r1", "r2"], ["r1"]]
    assert orders[begun[1]].ended == 0, "the first batch has ended by then"


def test_a_session_that_waits_for_its_next_turn_is_nothing_to_prefill():
    entering = Entering()
    entering.running, entering.waiting, entering.kv_holding_waiting = [], [object()], []
    entering.num_waiting_for_streaming_input = 1
    assert not entering._anything_to_prefill()
    entering.kv_holding_waiting = [object()]
    assert entering._anything_to_prefill()
