# SPDX-License-Identifier: Apache-2.0
"""The prefill lane of a worker on a virtual GPU (model_check.py): what it launches, orders, reports and says."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from driver import LANE_THREAD
from test_given_up import STUCK, give_up, stuck
from test_loads import CHAT, LATE, LONG, noted, schedule
from test_scheduler import changed, outputs_of
from virtual_gpu import Timed
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu import model_runner

from vllm_pdmux.messages import Run, order_of, report_of
from vllm_pdmux.metrics.definitions import BESIDE, STEPS, key_of
from vllm_pdmux.policy import Kind
from vllm_pdmux.worker import prefill_lane, prefill_runner
from vllm_pdmux.worker.handover import HandoverV1
from vllm_pdmux.worker.lane import SerialLane
from vllm_pdmux.worker.layer_view import LayerView
from vllm_pdmux.worker.prefill_lane import RankFailed

FAST = {"has_gpu": True, "chunk": 64, "layer_ms": (0.0,)}  # whatever is launched has run
SLOW = {"has_gpu": True, "chunk": 64, "layer_ms": (10.0,)}  # a layer takes more than two decode steps


def reports_of(run):
    """Of the steps that the run will update."""
    reports, update = [], run.scheduler.update_from_output

    def noting(output, result):
        if (report := report_of(result)) is not None:
            reports.append(report)
        return update(output, result)

    run.scheduler.update_from_output = noting
    return reports


# --- what it launches ------------------------------------------------------------------------------------------------


def test_it_launches_what_is_ordered_and_goes_on_with_the_next_batch(lab):
    with noted(lab, schedule(CHAT, LONG, replace(LATE, step=4), **FAST), layers=3) as (run, _):
        reports = reports_of(run)
        run.run()
        run.check_answers()
    launched = [report.runs for report in reports if report.runs]
    assert launched == [
        (Run(0, 0, 3),),
        (Run(0, 3, 6),),
        (Run(0, 6, 8), Run(1, 0, 1)),
        (Run(1, 1, 4),),
        (Run(1, 4, 7),),
        (Run(1, 7, 8),),
    ]


def test_a_gpu_that_is_behind_gets_no_more_and_its_steps_are_beside_prefill_all_the_same(lab):
    """It has work in all of them but the first, which began without. None of them waits for the batch."""
    with noted(lab, schedule(CHAT, LONG, **SLOW), layers=8) as (run, notes):
        reports, outputs = reports_of(run), outputs_of(run)
        run.run()
        run.check_answers()
    assert len(reports) == sum(order_of(output).batch_id is not None for output in outputs)
    while_it_ran = [report for report in reports if not report.ended]
    assert [report.runs for report in reports].count(()) > 5
    assert [report.is_saturated for report in while_it_ran[:10]] == [False] + [True] * 9
    assert {step.step_ms for step in notes.seen if step.kind is Kind.BESIDE} == {4.0}
    assert run.scheduler._counters.values[key_of(STEPS, BESIDE)] == len(reports)


def test_with_nothing_decoding_a_batch_runs_to_its_end_in_a_step_though_it_has_just_come(lab):
    """The second chunk must be where the first one is, for prompt logprobs, and the chat has ended meanwhile."""
    chat, long = replace(CHAT, max_tokens=5), replace(LONG, wants_prompt_logprobs=True)
    with noted(lab, schedule(chat, long), layers=4) as (run, _):
        reports = reports_of(run)
        run.run()
        run.check_answers()
    assert [report.runs for report in reports] == [(Run(0, 0, 4),), (Run(0, 4, 8),), (Run(1, 0, 8),)]


def test_a_batch_waits_for_the_decode_steps_that_were_queued_when_it_was_admitted(lab):
    """For the last one too: with it a request may have read the blocks that the batch is to write."""
    with noted(lab, schedule(CHAT, LONG, replace(LATE, step=5), has_gpu=True, chunk=64), layers=2) as (run, _):
        lane, admitted, begun = run.lane, {}, []
        before, begin = lane.before_decode, lane._device.begin

        def noting_before(output, order):
            before(output, order)
            if order.start is not None:
                admitted[order.batch_id] = run.gpu.decode.end_s

        def noting_begin(after):
            begun.append((lane._current.id, after.end_s))
            begin(after)

        lane.before_decode, lane._device.begin = noting_before, noting_begin
        run.run()
    assert begun == list(admitted.items()) and len(begun) == 2


def test_a_lane_that_does_not_divide_has_no_thread(lab):
    with noted(lab, schedule(CHAT, LONG, settings={"lane": "serial"})) as (run, _):
        assert isinstance(run.lane._lane, SerialLane)
        run.run()
        run.check_answers()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_on_a_gpu_its_thread_outlives_a_batch(lab, has_gpu):
    with noted(lab, schedule(CHAT, LONG, has_gpu=has_gpu)) as (run, _):
        run.run()
        found = [thread for thread in threading.enumerate() if thread.name == LANE_THREAD]
        assert len(found) == has_gpu and all(thread.daemon for thread in found), "a layer may never return"


@pytest.mark.parametrize("use_v2", [False, True])
def test_first_tokens_are_masked_as_it_was_when_their_batch_was_scheduled(lab, monkeypatch, use_v2):
    """vLLM fills one buffer again in each step."""
    buffer, masks, wanted = np.zeros((1, 1), dtype=np.int32), [], []
    sample = Timed.sample_tokens

    def noting(runner, grammar):
        if not runner.is_decode:
            masks.append((grammar.structured_output_request_ids, int(grammar.grammar_bitmask[0, 0])))
        return sample(runner, grammar)

    def bitmask(output):
        buffer[0, 0] += 1
        if list(output.num_scheduled_tokens) == ["r1"]:
            wanted.append((["r1"], int(buffer[0, 0])))
        return GrammarOutput(list(output.num_scheduled_tokens), buffer)

    monkeypatch.setattr(Timed, "sample_tokens", noting)
    with noted(lab, schedule(CHAT, LONG, use_v2=use_v2)) as (run, _):
        run.scheduler.get_grammar_bitmask = bitmask
        run.run()
        run.check_answers()
    assert masks == wanted[:2] and buffer[0, 0] > wanted[1][1]


@pytest.mark.parametrize("use_v2", [False, True])
def test_its_runner_has_the_kv_cache_of_the_decode_lane(lab, use_v2):
    with lab.lend(schedule(CHAT, use_v2=use_v2)) as (_, _, worker):
        decode, prefill = worker.model_runner, worker._prefill_lane._runner
        assert prefill is not decode and prefill.kv_caches is decode.kv_caches
        assert prefill.kv_cache_config is decode.kv_cache_config


def test_a_v2_runner_is_built_with_the_kv_cache_that_the_layers_are_bound_to():
    """vLLM's allocates one by a function of its module."""

    class Runner:
        def __init__(self, config, device):
            self.config, self.device = config, device

        def load_model(self, model):
            self.model = model

        def initialize_kv_cache(self, kv_cache_config):
            self.kv_cache_config, self.kv_caches = kv_cache_config, model_runner.init_kv_cache(kv_cache_config)

    decode, stock = Runner("stock", "device"), model_runner.init_kv_cache
    decode.model, decode.kv_cache_config, decode.kv_caches = "model", "sizes", ["of layer 0", "of layer 1"]
    runner = prefill_runner._build_v2(decode, "config")
    assert (runner.config, runner.device, runner.model) == ("config", "device", "model")
    assert runner.kv_cache_config == "sizes" and runner.kv_caches == {0: "of layer 0", 1: "of layer 1"}
    assert model_runner.init_kv_cache is stock


def test_a_layer_is_a_place_to_stop_where_it_is_first_looked_up():
    """It looks itself up twice, and layers of experts, which are none, in between."""
    stops = []
    view = LayerView({"a": 1, "experts": 2, "b": 3}, {"a", "b"}, lambda: stops.append(len(stops)))
    assert [view[name] for name in ("a", "a", "experts", "b", "b", "experts")] == [1, 1, 2, 3, 3, 2]
    assert len(stops) == 2
    view.begin()
    assert view["b"] == 3 and len(stops) == 3, "of the next forward pass"


def test_half_done_prompt_logprobs_go_with_a_request_and_end_with_it():
    """Of a V1 runner."""

    def runner(**num_prompt_logprobs):
        rows = SimpleNamespace(removed=[])
        rows.remove_request = rows.removed.append
        return SimpleNamespace(requests={}, input_batch=rows, num_prompt_logprobs=num_prompt_logprobs)

    source, target, state = runner(a=5), runner(), object()
    source.requests.update(a=state, b=object())
    HandoverV1().move(["a", "b", "new"], source, target)
    assert target.requests["a"] is state and target.num_prompt_logprobs == {"a": 5}
    assert not source.requests and not source.num_prompt_logprobs and source.input_batch.removed == ["a", "b"]
    HandoverV1().forget(["a", "new"], target)
    assert list(target.requests) == ["b"] and not target.num_prompt_logprobs and target.input_batch.removed == ["a"]


def test_adapters_are_looked_at_before_and_after_each_stop(lab):
    """What the decode lane did to their slots meanwhile would change what the next layer computes."""
    with noted(lab, schedule(CHAT, replace(LONG, own_tokens=20))) as (run, _):
        seen, checked = [], []
        slots = lambda: seen.append({"adapter": len(seen)}) or seen[-1]  # noqa: E731
        run.lane._lora = SimpleNamespace(slots=slots, check=checked.append)
        run.run()
    assert checked == seen and len(seen) == 8


# --- what it says ----------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """The errors in the log, with those that were raised."""
    lines = []
    monkeypatch.setattr(prefill_lane.logger, "exception", lambda text, *values: lines.append(text % values))
    return lines


def test_a_batch_that_raises_is_said_with_its_requests(lab, said):
    what = schedule(CHAT, LONG, replace(LATE, step=3), chunk=64, faults={0: 2})
    with noted(lab, what) as (run, _):
        run.run()
        run.check_answers()
    assert said == ["prefill batch 0 failed; its requests are r1, r2"]


def test_a_rank_that_raises_ends_its_process_since_others_may_wait_for_it(lab, said):
    with changed(lab, "parallel_config", world_size=2), noted(lab, schedule(CHAT, LONG, faults={0: 2})) as (run, _):
        assert run.lane._is_one_of_many
        with pytest.raises(RankFailed, match="prefill failed on one rank, and others may wait for it: at 2 of batch 0"):
            run.run()
    assert not issubclass(RankFailed, Exception) and len(said) == 1


def test_what_it_is_doing_in_a_line(lab):
    two = replace(STUCK, plans=(*STUCK.plans, replace(STUCK.plans[1], content=1)))
    with stuck(lab, two) as (run, _):
        order = run.lane._order
        assert run.lane.describe() == (
            "layer 2 of batch 0 has begun (52 tokens of r1, r2); 0 batches wait; launched and not reported: []; "
            f"last step: {run.step}, 1 requests decoding, order: batch 0, 1 layers, group {order.group}, "
            "drop up to None"
        )
        assert run.lane.progress() == (0, 2, (), False, None)
        give_up(run)
        assert run.lane.describe() == (
            "no batch is being launched, and something may run yet of the batches up to 0, which were given up; "
            f"0 batches wait; launched and not reported: []; last step: {run.step}, 1 requests decoding, "
            "order: batch None, 0 layers, group 0, drop up to None, give up up to 0"
        )


def test_or_that_decode_waits_for_what_was_dropped(lab):
    with stuck(lab) as (run, _):
        run.core.abort_requests(["r1"])
        run.aborted.add(("r1", False))
        outputs = outputs_of(run)
        while not outputs or order_of(outputs[-1]).drop is None:
            run.one_step()
        assert run.lane.describe().startswith("decode waits for layers that were dropped; 0 batches wait; ")


def test_it_says_that_batches_wait_and_which_are_launched(lab):
    with noted(lab, schedule(CHAT, LONG, replace(LATE, step=4), **SLOW), layers=2) as (run, _):
        while not run.lane._queue:
            run.one_step()
        assert "; 1 batches wait; launched and not reported: []; " in run.lane.describe()
        while not run.lane._launched:
            run.one_step()
        assert "; 0 batches wait; launched and not reported: [0]; " in run.lane.describe()
        run.run()
