# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own part, on a virtual GPU (model_check.py): what it is made of and says, and whose step it is."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from model_check import Checked
from test_loads import CHAT, LATE, LONG, noted, schedule
from test_simulator import PLAIN
from vllm.v1.core.sched.interface import PauseState

from vllm_pdmux import scheduler as under_test
from vllm_pdmux.calibration.chosen import prior_of
from vllm_pdmux.messages import order_of
from vllm_pdmux.metrics.definitions import (
    BESIDE_STEPS,
    FUSED,
    FUSED_STEPS,
    INFEASIBLE_DECISIONS,
    LAYERS,
    PREFILL,
    STEPS,
    STOCK,
    key_of,
)
from vllm_pdmux.metrics.fused_reason import reason_of
from vllm_pdmux.model_size import decode_alone
from vllm_pdmux.pace import Pace
from vllm_pdmux.policy import SOONER, PromptWork
from vllm_pdmux.policy_from_config import max_prefill_tokens

SLO = {"policy": "slo", "itl_slo_ms": 20.0}


@contextmanager
def changed(lab, part, **values):
    """The engine's configuration with other values in one of its parts."""
    before = lab._config
    lab._config = copy.copy(before)
    setattr(lab._config, part, copy.copy(getattr(before, part)))
    for name, value in values.items():
        setattr(getattr(lab._config, part), name, value)
    try:
        yield
    finally:
        lab._config = before


@pytest.fixture
def said(monkeypatch):
    """All that it logs, with the level."""
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            under_test.logger, level, lambda text, *values, level=level: lines.append((level, text % values))
        )
    return lines


# --- what it is made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead, kind", [(0, "synchronous"), (1, "asynchronous")])
def test_its_start_is_told_in_a_line(lab, said, look_ahead, kind):
    settings = {"policy": "fixed", "fixed_group": 2, "lane": "serial"}
    with lab.lend(schedule(CHAT, look_ahead=look_ahead, settings=settings)):
        pass
    assert said == [("info", f"PD-multiplexing scheduler: {kind}, policy fixed, lane serial")]


@pytest.mark.parametrize("has_gpu, use_v2, max_batches", [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_a_gpu_with_a_v2_runner_has_a_batch_in_reserve(lab, has_gpu, use_v2, max_batches):
    with lab.lend(schedule(CHAT, has_gpu=has_gpu, use_v2=use_v2)) as (_, scheduler, _):
        assert scheduler._admission.max_batches == max_batches
        settings = under_test.settings_of(scheduler.vllm_config)
        assert scheduler._admission.most_tokens == max_prefill_tokens(settings, has_gpu)
        assert (scheduler._admission.most_tokens is None) == (not has_gpu)


@pytest.mark.parametrize("has_gpu, ranks, is_paced", [(True, 1, False), (True, 2, True), (False, 2, False)])
def test_several_gpus_and_no_others_are_paced_by_the_scheduler(lab, has_gpu, ranks, is_paced):
    with changed(lab, "parallel_config", world_size=ranks), lab.lend(schedule(CHAT, has_gpu=has_gpu)) as parts:
        assert isinstance(parts[1]._pace, Pace) == is_paced


class FirstWindow:
    """In the place of a pace: three layers of whatever is wanted."""

    def __init__(self):
        self.asked, self.told = [], []

    def layers(self, wanted, is_first):
        self.asked.append((wanted, is_first))
        return 3

    def reported(self, ordered, report):
        self.told.append((ordered, report.launched_layers))


def test_the_pace_is_asked_for_what_the_policy_wants_and_told_where_a_batch_begins(lab):
    with noted(lab, schedule(CHAT, LONG), layers=5) as (run, _):
        pace = run.scheduler._pace = FirstWindow()
        outputs = outputs_of(run)
        run.run()
        run.check_answers()
    assert pace.told == [(3, 3), (3, 3), (3, 2)] * 2, "of eight layers, twice"
    of_lane = [order for order in map(order_of, outputs) if order.batch_id is not None]
    assert pace.asked == [(5, order.start is not None) for order in of_lane]
    assert {order.layers for order in of_lane} == {3} and [is_first for _, is_first in pace.asked].count(True) == 2


def outputs_of(run):
    """Of the steps that the run will schedule."""
    outputs, schedule = [], run.scheduler.schedule
    run.scheduler.schedule = lambda *arguments: outputs.append(schedule(*arguments)) or outputs[-1]
    return outputs


def test_only_a_policy_with_a_target_learns_and_has_its_metrics(lab):
    for settings, learns in (({"policy": "table"}, False), (SLO, True)):
        with lab.lend(schedule(CHAT, settings=settings)) as (_, scheduler, _):
            assert (scheduler._observer is not None) == learns
            assert (INFEASIBLE_DECISIONS in scheduler._counters.values) == learns


def test_a_policy_with_a_target_begins_with_the_calibration_and_the_graphs(lab, said, monkeypatch):
    profile = PLAIN.model_copy(update={"prefill_ms_per_token_pair": 1e-5})
    given, chosen_by, build = [], [], under_test.build_policy

    def chosen(*arguments):
        chosen_by.append(arguments)
        return profile

    monkeypatch.setattr(under_test, "chosen_profile", chosen)
    monkeypatch.setattr(under_test, "mixed_graph_tokens", lambda config: 512 if config is lab._vllm_config else 0)
    monkeypatch.setattr(under_test, "build_policy", lambda *arguments: given.append(arguments) or build(*arguments))
    with lab.lend(schedule(CHAT, settings={**SLO, "sm_group_num": 5})) as (_, scheduler, _):
        config, settings = scheduler.vllm_config, under_test.settings_of(scheduler.vllm_config)
    assert chosen_by == [(config, settings, under_test._say, under_test._warn)]
    (_, splits, paced_by_device, alone, work, log, prior, graphs) = given[0]
    assert (splits, paced_by_device, work, graphs) == (3, False, profile.prompt_work, 512)
    assert prior == prior_of(profile, 3) and len(prior.groups) == 3
    assert vars(alone) == vars(decode_alone(config))
    assert scheduler._prompt_work == scheduler._observer._work == profile.prompt_work
    log("some text")
    assert said[-1] == ("warning", "PD-multiplexing: some text")


def test_without_a_target_nothing_is_looked_up(lab, monkeypatch):
    given, build = [], under_test.build_policy
    for name in ("chosen_profile", "decode_alone", "mixed_graph_tokens"):
        monkeypatch.setattr(under_test, name, lambda *arguments: pytest.fail("looked up"))
    monkeypatch.setattr(under_test, "build_policy", lambda *arguments: given.append(arguments) or build(*arguments))
    with lab.lend(schedule(CHAT, has_gpu=True)):
        pass
    assert given[0][2:5] == (True, None, PromptWork()) and given[0][6:] == (None, 0)


# --- its trace file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, name", [(0, "steps.json"), (1, "steps.engine1.json")])
def test_each_engine_that_is_asked_for_a_trace_file_has_one(lab, tmp_path, engine, name):
    settings = {"trace_file": str(tmp_path / "steps.json"), "layers_per_group": 4}
    what = schedule(CHAT, LONG, settings=settings)
    with changed(lab, "parallel_config", data_parallel_index=engine), noted(lab, what) as (run, _):
        run.run()
        run.scheduler.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    events = json.loads((tmp_path / name).read_text())
    assert [one["args"]["result"] for one in events if one["ph"] == "e"] == ["ended", "ended"]
    assert sum("layers" in one["name"] for one in events if one["ph"] == "X") == 4


def test_a_trace_file_that_ends_early_is_said(lab, tmp_path, said):
    path = tmp_path / "steps.json"
    with lab.lend(schedule(CHAT, settings={"trace_file": str(path)})) as parts:
        parts[1]._trace_file._left_bytes = 0
        Checked(lab, schedule(CHAT), *parts).run()
    warnings = [text for level, text in said if level == "warning"]
    assert len(warnings) == 1 and warnings[0].startswith(f"PD-multiplexing: trace_file {path} ends here")


def test_an_engine_without_one_shuts_down(lab):
    with lab.lend(schedule(CHAT)) as (_, scheduler, _):
        scheduler.shutdown()
        assert scheduler._trace_file is None and not scheduler.pdmux_trace._sinks


# --- whose step it is ------------------------------------------------------------------------------------------------


def to_step(run, step):
    while run.step < step:
        run.one_step()


def test_where_the_engine_throttles_prompts_both_lanes_do(lab, monkeypatch):
    """vLLM does so that the engines of data parallelism prefill in the same steps."""
    with noted(lab, schedule(CHAT, LONG)) as (run, notes):
        outputs = outputs_of(run)
        to_step(run, 3)
        with monkeypatch.context() as patch:
            patch.setattr(run.core, "_should_throttle_prefills", lambda: True)
            to_step(run, 6)
            (waits,) = run.scheduler.waiting
            assert waits.num_computed_tokens == 0 and not any(order_of(output).start for output in outputs)
            assert not notes.fused and len(run.said["r0", False]) == 6
        run.one_step()
        assert order_of(outputs[-1]).start is not None
        run.run()
        run.check_answers()


def test_what_finds_no_room_is_not_throttled_afterwards(lab, monkeypatch):
    """LATE did not fit into the batch: that is known after the decode lane's step too, which has seen nobody wait."""
    with noted(lab, schedule(CHAT, LONG, replace(LATE, step=3)), layers=8) as (run, _):
        outputs = outputs_of(run)
        to_step(run, 4)
        assert run.scheduler.prefill_capacity_bound is True
        monkeypatch.setattr(run.core, "_should_throttle_prefills", lambda: True)
        to_step(run, 6)
        begun = [order.start and list(order.start.num_scheduled_tokens) for order in map(order_of, outputs)]
        assert begun[3:] == [["r1"], ["r1", "r2"], None], "a half of LATE has found room, and nobody waits"
        run.run()
        run.check_answers()


def test_a_paused_engine_asks_its_policy_nothing(lab):
    with noted(lab, schedule(CHAT, LONG)) as (run, notes):
        to_step(run, 3)
        run._send("r1", LONG)
        run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert run.scheduler.schedule().total_num_scheduled_tokens == 0 and not notes.fused and not notes.decided
        run.scheduler.set_pause_state(PauseState.UNPAUSED)
        run.step += 1
        run.run()
        run.check_answers()
        assert notes.fused and notes.decided


def test_a_prompt_whose_logprobs_are_gathered_in_the_lane_goes_on_there_with_nothing_decoding(lab):
    chat, long = replace(CHAT, max_tokens=5), replace(LONG, wants_prompt_logprobs=True)
    with noted(lab, schedule(chat, long), layers=4) as (run, notes):
        outputs = outputs_of(run)
        run.run()
        run.check_answers()
    assert sum(order_of(output).start is not None for output in outputs) == 2 and notes.decided[-1].decode_batch == 1
    assert len(run.said["r0", False]) == 5


def test_one_whose_logprobs_are_gathered_in_stock_steps_goes_on_there(lab):
    long = replace(LONG, step=0, content=1, wants_prompt_logprobs=True)
    with noted(lab, schedule(CHAT, long)) as (run, notes):
        outputs = outputs_of(run)
        run.run()
        run.check_answers()
    assert (
        not notes.fused and not notes.decided and not any(order_of(output).batch_id is not None for output in outputs)
    )


# --- fused steps -----------------------------------------------------------------------------------------------------


def test_in_a_fused_step_all_that_decode_come_before_a_prompt_that_is_half_done(lab):
    """LATE has overtaken LONG, behind which it runs: in that order the tokens would not be enough for it."""
    with noted(lab, schedule(CHAT, replace(LONG, own_tokens=100), LATE), overtakes=True) as (run, notes):
        while not run.said.get(("r2", False)):
            run.one_step()
        assert [request.request_id for request in run.scheduler.running] == ["r0", "r1", "r2"]
        notes._fused, outputs = 7, outputs_of(run)
        run.one_step()
        assert outputs[0].num_scheduled_tokens == {"r0": 1, "r2": 1, "r1": 7}
        run.run()
        run.check_answers()


def test_fused_steps_are_counted_with_the_policys_reason(lab):
    with noted(lab, schedule(CHAT, LONG, LATE), fused=12) as (run, notes):
        notes.fused_reason = SOONER
        run.run()
        values = run.scheduler._counters.values
    assert values[key_of(STEPS, FUSED)] == values[key_of(FUSED_STEPS, SOONER)] == 4
    assert values[key_of(FUSED_STEPS, STOCK)] == 0


def test_without_statistics_no_step_has_a_reason(lab):
    with noted(lab, schedule(CHAT, LONG), fused=12) as (run, notes):
        notes.fused_reason, run.scheduler._counters = SOONER, None
        outputs = outputs_of(run)
        to_step(run, 4)
        assert outputs[3].total_num_scheduled_tokens == 13 and reason_of(outputs[3]) == STOCK
        run.run()


# --- what its runners and the metrics are told -----------------------------------------------------------------------


def test_the_steps_and_layers_of_the_lane_are_counted(lab):
    with noted(lab, schedule(CHAT, LONG, LATE)) as (run, _):
        run.run()
        values = run.scheduler._counters.values
    assert values[LAYERS] == 8 * run.counts["batches ended"] == 8 * 3
    assert values[key_of(BESIDE_STEPS, 1)] == values[key_of(STEPS, "beside")] == 2 * 3


def test_who_was_preempted_for_the_lane_is_told_to_the_runner_of_the_decode_lane(lab):
    """Two prompts are half done, and there is no block left for the first one: the other one gives its blocks."""
    long, other = replace(LONG, own_tokens=100), replace(LATE, own_tokens=60)
    with noted(lab, schedule(CHAT, long, other), layers=8, overtakes=True) as (run, notes):
        while sum(request.is_prefill_chunk for request in run.scheduler.running) < 2 or run.scheduler._batches:
            run.one_step()
        notes._overtakes = False
        run._squeeze()
        output = run.scheduler.schedule()
        assert output.preempted_req_ids == {"r2"} and order_of(output).start.num_scheduled_tokens.keys() == {"r1"}
        run.worker.execute_model(output)


def test_a_step_of_the_lane_alone_is_counted_with_its_layers(lab):
    """The chat is gone when half of LONG's first chunk has run."""
    with noted(lab, schedule(replace(CHAT, abort=4), LONG)) as (run, _):
        run.run()
        values = run.scheduler._counters.values
    assert values[LAYERS] == 8 * run.counts["batches ended"] and values[key_of(BESIDE_STEPS, 1)] == 1
    assert values[key_of(STEPS, PREFILL)] == 3, "the chat's, the other half's and the one of what is left of LONG"


def test_what_the_policy_counts_itself_is_in_the_metrics(lab):
    with noted(lab, schedule(CHAT, settings=SLO)) as (run, notes):
        notes.infeasible_decisions = 3
        run.run()
        assert run.scheduler._counters.values[INFEASIBLE_DECISIONS] == 3


def test_a_step_that_does_nothing_but_drop_is_in_the_trace_and_one_that_does_nothing_is_not(lab):
    with noted(lab, schedule(CHAT, LONG, settings={"trace_steps": 100}), layers=2) as (run, _):
        to_step(run, 5)
        run.core.abort_requests(["r0", "r1"])
        run.aborted |= {("r0", False), ("r1", False)}
        run.run()
        steps = run.scheduler.pdmux_trace.steps
    assert [step.drop for step in steps] == [None] * 5 + [0]
    assert all(step.decode_batch or step.runs or step.drop is not None for step in steps)
