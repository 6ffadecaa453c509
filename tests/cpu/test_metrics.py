# SPDX-License-Identifier: Apache-2.0
"""Metrics: what is counted, how it reaches several front ends, and what is shown of it."""

import random
import re
from collections import Counter as Totals
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import tiny_model
from driver import Arrival, prompt
from metrics_page import Page
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput

from vllm_pdmux.messages import LaneReport, PrefillOrder, Run, report_of
from vllm_pdmux.metrics import wire
from vllm_pdmux.metrics.counters import Counters
from vllm_pdmux.metrics.definitions import PREFIX, group_labels, metrics
from vllm_pdmux.metrics.exported import Exported
from vllm_pdmux.metrics.fused_reason import attach_reason
from vllm_pdmux.metrics.log_line import log_line
from vllm_pdmux.step_times import StepTime
from vllm_pdmux.worker.gpu import PDMuxGPUWorker
from vllm_pdmux.worker.launched import LaunchedBatches, PendingReport
from vllm_pdmux.worker.worker import PDMuxWorkerMixin

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ARRIVALS = [
    *[Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY) for i in range(3)],
    Arrival("long", prompt(300, 8), GREEDY, step=5),  # two chunks: it joins once
    Arrival("late", prompt(50, 9), GREEDY, step=12),
]
SPLITS = 3
README = Path(__file__).parents[2] / "README.md"


# --- counting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def counters():
    return Counters(SPLITS, True)


def step(*tokens):
    scheduled = {f"r{i}": n for i, n in enumerate(tokens)}
    return SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(tokens))


def run(counters, output, order=PrefillOrder(), report=None, took=StepTime(1.0, 1.25)):
    counters.done(output, took, order, report)


def value(counters, key):
    return counters.values[PREFIX + key]


def beside(counters, group, first=0, end=2, **report):
    run(counters, step(1, 1), PrefillOrder(0, 2, group=group), LaneReport(0, (Run(0, first, end),), **report))


@pytest.mark.parametrize(
    "tokens, report, kind",
    [
        ((1, 1), None, "decode"),
        ((1, 200), None, "fused"),
        ((200, 100), None, "prefill"),
        ((1, 1), LaneReport(0), "beside"),
        ((), LaneReport(0), "prefill"),
    ],
)
def test_a_step_has_one_kind(counters, tokens, report, kind):
    order = PrefillOrder(0, 4, group=2)  # void where there is no report
    run(counters, step(*tokens), order, report)
    kinds = {each: value(counters, f"steps_total/{each}") for each in ("decode", "prefill", "fused", "beside")}
    assert kinds == {each: int(each == kind) for each in kinds}


def test_the_time_beside_prefill_is_that_of_its_steps(counters):
    beside(counters, 2)
    run(counters, step(1, 1), PrefillOrder(0, 2, group=2), LaneReport(0), StepTime(2.0, 3.0))
    run(counters, step(1, 1), took=StepTime(3.0, 9.0))
    assert value(counters, "beside_seconds_total/2") == 1_250_000


def test_a_change_is_a_step_beside_prefill_in_another_group(counters):
    for group in (1, 1, 2, 1):
        beside(counters, group)
        run(counters, step(1))  # decode alone between them is no change
    assert value(counters, "division_changes_total") == 2
    assert [value(counters, f"beside_steps_total/{group}") for group in (1, 2, 3)] == [3, 1, 0]


def test_the_division_is_that_of_the_last_step(counters):
    beside(counters, 2)
    assert value(counters, "division") == 2
    run(counters, step(1, 1))
    assert value(counters, "division") == SPLITS + 1
    run(counters, step(), PrefillOrder(0, 8, group=2), LaneReport(0))  # nothing decodes
    assert value(counters, "division") == 0


def test_layers_dry_steps_and_steps_without_a_graph_come_from_the_report(counters):
    beside(counters, 1, 0, 3, is_saturated=False, lead_layers=5)
    beside(counters, 1, 3, 8, unconfined_steps=4, lead_layers=3)
    beside(counters, 1, 0, 1)  # a report before the worker has any
    beside(counters, 1, 8, 8)  # nothing of the batch was left to launch
    assert value(counters, "prefill_layers_total") == 9
    assert value(counters, "prefill_layer_groups_total") == 3
    assert value(counters, "dry_steps_total") == 1 and value(counters, "dry_seconds_total") == 250_000
    assert value(counters, "unconfined_steps_total") == 4


def test_the_worker_says_with_every_report_how_many_steps_found_no_graph():
    report = PendingReport(LaneReport(0), 1, None, LaunchedBatches(lambda output: True))

    class Worker(PDMuxWorkerMixin):
        vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
        _prefill_lane = SimpleNamespace(advance=lambda order, wait: report)
        _order = PrefillOrder(0, 2, group=1)
        _unconfined_steps = PDMuxGPUWorker._unconfined_steps
        _decode_graphs = SimpleNamespace(unconfined_steps=3)

    output = Worker()._advance(ModelRunnerOutput(req_ids=[], req_id_to_index={}), nothing_decodes=False)
    assert report_of(output).unconfined_steps == 3


def test_a_policy_that_is_exchanged_takes_nothing_back(counters):
    counters.look_at(SimpleNamespace(infeasible_decisions=2), 1)
    counters.look_at(object(), 0)
    assert value(counters, "infeasible_decisions_total") == 2
    assert value(counters, "batches_in_lane") == 0


def test_without_a_target_nothing_is_said_of_one():
    keys = Counters(SPLITS, False).values
    assert not [key for key in keys if "missed" in key or "infeasible" in key]
    assert len(Counters(SPLITS, True).values) == len(keys) + 2
    assert len(metrics(SPLITS, True)) == len(metrics(SPLITS, False)) + 3  # and how well it predicts


# --- on the way -------------------------------------------------------------------------------------------------------


def outputs_to(client_index):
    stats = SimpleNamespace(running_lora_adapters={})
    return {7: SimpleNamespace(scheduler_stats=None), client_index: SimpleNamespace(scheduler_stats=stats)}, stats


def test_shares_of_several_front_ends_add_up_though_messages_are_lost():
    choice, counters, shares = random.Random(4), Counters(SPLITS, True), wire.Shares()
    read = {0: {}, 1: {}, 2: {}}
    for number in range(200):
        beside(counters, choice.choice([1, 2, 3]), is_saturated=choice.random() < 0.5)
        client = number % 3 if number >= 197 else choice.choice([0, 1, 2])
        outputs, stats = outputs_to(client)
        wire.attach(outputs, counters.values, shares)
        if number >= 197 or choice.random() < 0.7:
            read[client] = wire.take(stats)
    total = sum((Totals(values) for values in read.values()), Totals())
    gauges = {PREFIX + "division", PREFIX + "batches_in_lane", PREFIX + "lead_layers"}
    assert {k: v for k, v in counters.values.items() if v and k not in gauges} == {
        k: v for k, v in total.items() if v and k not in gauges
    }
    assert read[199 % 3][PREFIX + "division"] == counters.values[PREFIX + "division"]


def test_what_is_not_ours_stays_in_the_statistics():
    stats = SimpleNamespace(running_lora_adapters={"adapter": 1, PREFIX + "joins_total": 2})
    assert wire.take(stats) == {PREFIX + "joins_total": 2}
    assert stats.running_lora_adapters == {"adapter": 1}


def test_a_front_end_in_rust_is_told_nothing():
    assert wire.is_read({}) and wire.is_read({"VLLM_USE_RUST_FRONTEND": "0"})
    assert not wire.is_read({"VLLM_USE_RUST_FRONTEND": "1"})


# --- showing ----------------------------------------------------------------------------------------------------------


def page():
    return Page(prometheus_client.generate_latest().decode())


def export(label_texts=None):
    return Exported(metrics(SPLITS, True), "a model", [0], label_texts or {})


def test_all_is_shown_as_zero_before_anything_has_happened():
    export()
    zeros = page()
    assert {PREFIX + name: kind for name, kind in zeros.types.items()} == {
        metric.name: metric.type for metric in metrics(SPLITS, True)
    }
    assert {number for values in zeros.values.values() for number in values.values()} == {0.0}
    shown = [one for kinds in zeros.histograms.values() for one in kinds.values()]
    assert len(shown) == 4 and {n for one in shown for n in (one.count, one.sum, *one.buckets.values())} == {0.0}
    assert {name for name, kind in zeros.types.items() if kind == "gauge"} == {
        *("division", "batches_in_lane", "lead_layers")
    }


def test_cumulative_values_are_shown_as_they_are_and_a_new_engines_are_added():
    exported = export({"2": "2 disjoint 84:48"})
    joins, seconds = PREFIX + "joins_total", PREFIX + "beside_seconds_total/2"
    for values in ({joins: 3, seconds: 500_000}, {joins: 3, seconds: 500_000}, {joins: 8, seconds: 1_500_000}):
        exported.set(0, values)
    assert page().of("joins_total") == 8
    assert page().of("beside_seconds_total", "2 disjoint 84:48") == pytest.approx(1.5)
    exported.set(0, {joins: 2, PREFIX + "batches_in_lane": 2, PREFIX + "of_a_later_version_total": 1})
    assert page().of("joins_total") == 10 and page().of("batches_in_lane") == 2
    export()
    assert page().of("joins_total") == 0


def test_labels_are_readable_where_the_divisions_are_known():
    rows = [(112, 20, 0), (84, 48, 0)]
    assert group_labels(rows, ["capped", "disjoint"], True) == {"1": "1 capped 112:20", "2": "2 disjoint 84:48"}
    assert group_labels(rows, "capped", True)["2"] == "2 capped 84:48"
    assert group_labels(rows, "capped", False) == group_labels([], "capped", True) == {}


def test_the_line_says_what_was_counted_since_the_last_one(counters):
    labels = {"2": "2 disjoint 84:48"}
    beside(counters, 2)
    before = dict(counters.values)
    assert log_line(before, before, labels) is None
    for group in (1, 2, 2):
        beside(counters, group, is_saturated=group == 2)
    run(counters, attach_reason(step(1, 200), SimpleNamespace(fused_reason="sooner")), took=StepTime(1.0, 1.04))
    run(counters, step(1, 200), took=StepTime(1.0, 1.02))
    counters.batch_ended(tokens=300, joins=2)
    assert log_line(before, counters.values, labels) == (
        "steps: 0 decode, 0 prefill, 2 fused (sooner: 1, stock: 1), 3 beside (group 1: 1, 2 disjoint 84:48: 2); "
        "mean: fused 30.0 ms, beside 250.0 ms; "
        "lane: 1 batches, 300 tokens, 6 layers in 3 groups, 2 joins; lane dry in 1 steps"
    )


def test_the_line_of_an_engine_that_has_begun_again_counts_from_0(counters):
    for _ in range(5):
        beside(counters, 2)
    again = Counters(SPLITS, True)
    for _ in range(2):
        beside(again, 1, 0, 3)
    assert log_line(counters.values, again.values, {}) == (
        "steps: 0 decode, 0 prefill, 0 fused, 2 beside (group 1: 2); mean: beside 250.0 ms; "
        "lane: 0 batches, 0 tokens, 6 layers in 2 groups, 0 joins"
    )


def test_the_readme_lists_metrics_that_there_are():
    listed = re.findall(r"^\| `(vllm_pdmux:\w+)", README.read_text(), re.MULTILINE)
    assert listed and set(listed) <= {metric.name for metric in metrics(SPLITS, True)}


# --- in an engine -----------------------------------------------------------------------------------------------------


def difference(driver, before):
    return {key.removeprefix(PREFIX): n - before.get(key, 0) for key, n in driver.scheduler._counters.values.items()}


@pytest.mark.engine
def test_an_engine_counts_what_its_trace_shows(pdmux):
    before = dict(pdmux.scheduler._counters.values)
    pdmux.run(ARRIVALS)
    pdmux.settle()
    found, steps = difference(pdmux, before), pdmux.scheduler.pdmux_trace.steps
    ended = sum(one.batch_ended for one in steps)
    assert ended >= 3
    assert found["prefill_batches_total/ended"] == ended
    assert found["prefill_layers_total"] == ended * tiny_model.LAYERS
    assert found["prefill_layers_total"] == sum(one.end_layer - one.first_layer for one in steps)
    assert found["prefill_tokens_total"] == sum(one.prefill_tokens for one in steps)
    assert found["joins_total"] == 2
    assert found["steps_total/beside"] == sum(one.batch_id is not None and one.decode_tokens > 0 for one in steps)
    assert found["steps_total/fused"] == found["prefill_batches_total/failed"] == 0


@pytest.mark.engine
def test_a_batch_that_all_requests_have_left_is_dropped(pdmux):
    before = dict(pdmux.scheduler._counters.values)

    def abort(driver):
        if driver.in_lane("long"):
            driver.abort("long")

    pdmux.run(ARRIVALS[:4], abort)
    pdmux.settle()
    found = difference(pdmux, before)
    assert found["prefill_batches_total/dropped"] == 1 and found["joins_total"] == 0


@pytest.mark.engine
def test_a_batch_that_raises_has_failed(pdmux, monkeypatch):
    before = dict(pdmux.scheduler._counters.values)
    lane = pdmux.worker._prefill_lane

    def fail(*_):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(lane._runner, "execute_model", fail)
        pdmux.run(ARRIVALS[:4])
    found = difference(pdmux, before)
    assert found["prefill_batches_total/failed"] == 1 and found["prefill_batches_total/ended"] == 0


@pytest.mark.engine
def test_offline_the_line_is_beside_vllms_own(start_engine, tiny_model_path, caplog_vllm):
    engine = start_engine(tiny_model_path, pdmux={"itl_slo_ms": 0.001})  # one that no step can keep
    engine.run(ARRIVALS)
    shown = page()
    shown.assert_whole(tiny_model.LAYERS)
    assert shown.of("joins_total") == 2 and shown.of("missed_steps_total") > 0
    with caplog_vllm.at_level("INFO", "vllm"):
        engine.engine.do_log_stats()
        engine.engine.do_log_stats()
    lines = [one.getMessage() for one in caplog_vllm.records]
    ours = [line for line in lines if line.startswith("Engine 000: PD-multiplexing steps: ")]
    assert len(ours) == 1 and "2 joins" in ours[0], lines  # the second time nothing has happened since


@pytest.mark.engine
def test_other_loggers_see_no_value_of_ours(pdmux):
    manager, seen = pdmux.engine.logger_manager, []

    class Other:
        def record(self, scheduler_stats, *_, **__):
            seen.append(dict(scheduler_stats.running_lora_adapters))

    manager.stat_loggers.append(Other())
    try:
        pdmux.run(ARRIVALS[:1])
    finally:
        manager.stat_loggers.pop()
    assert seen and not any(seen)


@pytest.mark.engine
def test_without_statistics_nothing_is_computed(start_engine, tiny_model_path):
    engine = start_engine(tiny_model_path, pdmux={}, disable_log_stats=True)
    engine.run(ARRIVALS[:4])
    assert engine.scheduler._counters is None and not engine.scheduler._shares._shares
    assert engine.engine.logger_manager is None


@pytest.mark.engine
def test_an_engine_of_stock_vllm_has_vllms_loggers_alone(stock, pdmux):
    """Though one of ours is in the same process."""
    kinds = [type(one).__module__ for one in stock.engine.logger_manager.stat_loggers]
    assert kinds and set(kinds) == {"vllm.v1.metrics.loggers"}
    ours = [type(one).__module__ for one in pdmux.engine.logger_manager.stat_loggers]
    assert ours[1:] == kinds and ours[0] == "vllm_pdmux.metrics.stat_logger"
