# SPDX-License-Identifier: Apache-2.0
"""Metrics of how long steps take: as histograms, against what was predicted, and why steps are fused."""

import random
from types import SimpleNamespace

import prometheus_client
import pytest
import tiny_model
from driver import Arrival, prompt
from metrics_page import PREFIX, Page
from test_metrics import step
from test_slo import CAPPED, Device, load, policy, serve
from vllm import SamplingParams
from vllm.v1.metrics import reader

from vllm_pdmux.messages import LaneReport, PrefillOrder, Run
from vllm_pdmux.metrics import wire
from vllm_pdmux.metrics.counters import Counters
from vllm_pdmux.metrics.definitions import PREDICTION, STEP_SECONDS, STEP_SECONDS_BUCKETS, key_of, metrics
from vllm_pdmux.metrics.exported import Exported
from vllm_pdmux.metrics.fused_reason import attach_reason
from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import LANE_EMPTY, OFF, SOONER, Kind, Observation, OffPolicy, PromptWork, Target
from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.table import TablePolicy
from vllm_pdmux.step_times import StepTime
from vllm_pdmux.worker.lane_device import CudaDevice, HostDevice

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ARRIVALS = [
    *[Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY) for i in range(3)],
    Arrival("long", prompt(300, 8), GREEDY, step=5),
    Arrival("late", prompt(50, 9), GREEDY, step=12),
]
SPLITS = 3


@pytest.fixture
def counters():
    return Counters(SPLITS, True)


def run(counters, output, ms, report=None):
    counters.done(output, StepTime(5.0, 5.0 + ms / 1e3), PrefillOrder(0, 2, group=2), report)


def beside(counters, ms, **report):
    run(counters, step(1, 1), ms, LaneReport(0, (Run(0, 0, 2),), **report))


def export():
    return Exported(metrics(SPLITS, True), "a model", [0], {})


def shown(name, label_value=""):
    return Page(prometheus_client.generate_latest().decode()).histograms[name][label_value]


# --- how long ---------------------------------------------------------------------------------------------------------


def test_the_histogram_is_that_of_prometheus_client_for_the_same_values(counters):
    choice, exported, kinds = random.Random(6), export(), ("decode", "fused", "beside")
    registry = prometheus_client.CollectorRegistry()
    own = prometheus_client.Histogram("own", "Own.", ["kind"], registry=registry, buckets=STEP_SECONDS_BUCKETS)
    limits = [1e3 * bound for bound in STEP_SECONDS_BUCKETS]
    for number in range(300):
        ms, kind = choice.choice([round(choice.lognormvariate(2.5, 1.5), 3), *limits]), choice.choice(kinds)
        took_s = StepTime(5.0, 5.0 + ms / 1e3).ms / 1e3  # with what the clock's resolution makes of it
        own.labels(kind).observe(took_s)
        if kind == "beside":
            beside(counters, ms)
        else:
            run(counters, step(1, 1) if kind == "decode" else step(1, 200), ms)
        if number % 7 == 0:
            exported.set(0, counters.values)
    exported.set(0, counters.values)
    for kind in kinds:
        got, sample = shown("step_seconds", kind), registry.get_sample_value
        expected = {le: sample("own_bucket", {"kind": kind, "le": le}) for le in got.buckets}
        assert got.buckets == expected and got.count == sample("own_count", {"kind": kind}) > 50
        assert got.sum == pytest.approx(sample("own_sum", {"kind": kind}), abs=1e-6 * got.count)


def test_a_prefill_alone_is_nobodys_itl(counters):
    run(counters, step(200, 300), 40.0)
    assert not [key for key in counters.values if key.startswith(STEP_SECONDS)]


def test_the_time_of_a_step_beside_prefill_is_in_the_seconds_of_its_division_too(counters):
    for ms in (7.2, 9.4):
        beside(counters, ms, is_saturated=ms > 9)
    assert counters.values[key_of(key_of(STEP_SECONDS, "beside"), "sum")] == 16_600
    assert counters.values[PREFIX + "beside_seconds_total/2"] == 16_600
    assert counters.values[PREFIX + "dry_seconds_total"] == 7_200


def test_histograms_of_several_front_ends_add_up_though_messages_are_lost(counters):
    choice, shares, told = random.Random(2), wire.Shares(), {0: {}, 1: {}}
    for number in range(200):
        beside(counters, choice.uniform(1, 1500))
        client, stats = number % 2, SimpleNamespace(running_lora_adapters={})
        wire.attach({client: SimpleNamespace(scheduler_stats=stats)}, counters.values, shares)
        if number >= 198 or choice.random() < 0.6:
            told[client] = wire.take(stats)
    exported = export()
    for values in told.values():  # each into an engine's metrics that have begun again: Prometheus adds up
        exported.set(0, values)
        exported._last.clear()
    assert shown("step_seconds", "beside").count == 200
    assert shown("step_seconds", "beside").sum == pytest.approx(counters.values[f"{STEP_SECONDS}/beside/sum"] / 1e6)


def test_an_engine_that_has_begun_again_is_added(counters):
    exported = export()
    beside(counters, 9.0)
    beside(counters, 9.0)
    exported.set(0, counters.values)
    again, shares = Counters(SPLITS, True), wire.Shares()
    for ms in (40.0, 9.0, 9.0):  # as many as before, in the end, of those that it does not have at first
        beside(again, ms)
        exported.set(0, shares.of(0, again.values))
    assert shown("step_seconds", "beside").count == 5
    assert shown("step_seconds", "beside").sum == pytest.approx(0.076)


# --- against what was expected ----------------------------------------------------------------------------------------


class Expecting:
    """A policy with a target of 20 ms that expects 10."""

    seen = 0

    def expected_ms(self, step):
        return 10.0 if step.kind is Kind.BESIDE else None

    def target_ms(self, step):
        return 20.0

    def observe(self, step):
        self.seen += 1


def told(counters, tokens, order, report, ms):
    """A step as the scheduler tells of it; how many steps the policy has learned from."""
    observer, output = Observer(Expecting(), PromptWork(), counters.judge), step(*tokens)
    requests = {name: SimpleNamespace(num_computed_tokens=300) for name in output.num_scheduled_tokens}
    observer.scheduled(output, order, requests)
    took = StepTime(5.0, 5.0 + ms / 1e3)
    counters.done(output, took, order, report)
    observer.done(output, took, 70.0, report is not None and report.is_saturated)
    return observer._policy.seen


BATCH = PrefillOrder(0, 2, group=2)


@pytest.mark.parametrize(
    "tokens, order, report, missed, predicted",
    [
        ((1, 1), BATCH, LaneReport(0), 1, 1),
        ((1, 1), BATCH, LaneReport(0, is_saturated=False), 1, 0),  # in part alone: it had to keep the target as well
        ((1, 200), PrefillOrder(), None, 1, 0),
        ((1, 1), PrefillOrder(), None, 0, 0),  # nothing beside it
        ((1, 1), BATCH, None, 0, 0),  # nor here: the order came when the batch had ended
    ],
)
def test_what_is_judged(counters, tokens, order, report, missed, predicted):
    learned = told(counters, tokens, order, report, ms=25.0)
    assert counters.values[PREFIX + "missed_steps_total"] == missed
    assert counters.values.get(f"{PREDICTION}/sum", 0) == 2_500_000 * predicted
    assert learned == (order is not BATCH or predicted)  # as without metrics
    told(counters, tokens, order, report, ms=15.0)
    assert counters.values[PREFIX + "missed_steps_total"] == missed


def test_measured_over_predicted_is_shown(counters):
    for ms in (4.0, 9.7, 10.0, 30.0):
        told(counters, (1, 1), BATCH, LaneReport(0), ms)
    export().set(0, counters.values)
    ratios = shown("beside_prediction_ratio")
    assert [ratios.buckets[le] for le in ("0.5", "0.9", "0.95", "1.0", "2.0", "+Inf")] == [1, 1, 1, 3, 3, 4]
    assert ratios.count == 4 and ratios.sum == pytest.approx(5.37)


def judged(slo, steps, device):
    """The ratios of measured and expected times of so many steps, None where nothing was expected."""
    ratios, observe = [], slo.observe

    def spy(step):
        expected_ms = slo.expected_ms(step)
        assert slo.target_ms(step)
        ratios.append(expected_ms and step.step_ms / expected_ms)
        observe(step)

    slo.observe = spy
    decided = serve(slo, device, load(), steps)
    del slo.observe
    return ratios, decided


def test_slo_predicts_what_steps_take_and_nothing_while_a_group_is_new():
    device = Device(CAPPED, error=0.2, noise=0.0)
    slo = policy(CAPPED, 2.0 * device.alone_ms(load()))
    device.warm_up(slo, load())
    device.may_fuse = False
    ratios, _ = judged(slo, 300, device)
    assert ratios[:2] == [None, None]  # the layers of another group may run in them
    assert all(ratio is not None for ratio in ratios[250:])
    assert ratios[250:] == pytest.approx([1.0] * 50, abs=0.02)
    other = next(group for group in (1, 5) if group != slo._group)
    assert slo.expected_ms(Observation(Kind.BESIDE, 9.0, 32, 65536, 50.0, other)) is None
    assert slo.expected_ms(Observation(Kind.DECODE, 9.0, 32, 65536)) is None


def test_slo_predicts_what_it_decided_with_though_the_step_is_another():
    device = Device(CAPPED, noise=0.0)
    slo = policy(CAPPED, 2.0 * device.alone_ms(load()))
    device.warm_up(slo, load())
    serve(slo, device, load(), 50)
    slo.decide(load())
    times = slo.expected_ms(Observation(Kind.BESIDE, 9.0, 64, 131072, 50.0, slo._group)) / slo.expected_ms(
        Observation(Kind.BESIDE, 9.0, 32, 65536, 50.0, slo._group)
    )
    assert times == pytest.approx(slo._alone.ms(64, 131072) / slo._alone.ms(32, 65536))


def test_on_a_cpu_decode_and_the_work_beside_it_are_predicted():
    slo = policy(CAPPED, paced_by_device=False)
    one = Observation(Kind.BESIDE, 30.0, 32, 65536, 100.0, 1)
    assert slo.expected_ms(one) is None and slo.target_ms(one) is None
    slo.observe(Observation(Kind.DECODE, 10.0, 32, 65536))
    assert slo.expected_ms(one) is None, "no rate is known"
    slo.observe(Observation(Kind.PREFILL, 50.0, prefill_work=200.0))
    assert slo.expected_ms(one) == pytest.approx(10.0 + 25.0) and slo.target_ms(one) == pytest.approx(15.0)


@pytest.mark.parametrize("paced_by_device", [True, False])
def test_what_is_asked_for_metrics_changes_no_decision(paced_by_device):
    def decisions(ask):
        device = Device(CAPPED, error=0.3, noise=0.2)
        slo = policy(CAPPED, 1.6 * device.alone_ms(load()), paced_by_device)
        device.warm_up(slo, load())
        return ask(slo, 400, device)[1], slo._tail.factor, slo._alone.ms(32, 65536), slo._beside.beliefs()

    assert decisions(judged) == decisions(lambda slo, steps, device: (None, serve(slo, device, load(), steps)))


# --- why a step is fused ----------------------------------------------------------------------------------------------


def test_slo_says_why():
    device = Device(CAPPED, noise=0.05)
    slo = policy(CAPPED, 60.0)
    device.warm_up(slo, load())
    serve(slo, device, load(), 300)
    reasons = {}
    for work in (300.0, 1e6):
        for target_ms in range(10, 200):
            slo._target = Target(itl_ms=float(target_ms))
            if slo.fused_tokens(load(waiting_work=work)):
                reasons.setdefault((work, slo.fused_reason), target_ms)
    # The few are not worth beginning with the lane at targets at which the many are.
    assert reasons[300.0, LANE_EMPTY] < reasons[300.0, SOONER]
    assert reasons[300.0, LANE_EMPTY] < reasons[1e6, SOONER]
    slo.fused_tokens(load(is_lane_busy=True))
    assert slo.fused_reason == SOONER


def test_fused_steps_and_the_prompt_tokens_in_them_are_counted_by_reason(counters):
    for reason, tokens in ((SOONER, (1, 1, 200, 56)), (SOONER, (1, 90)), (LANE_EMPTY, (1, 30)), (SOONER, (1, 1))):
        run(counters, attach_reason(step(*tokens), SimpleNamespace(fused_reason=reason)), 20.0)
    run(counters, step(1, 500), 20.0)
    found = {key.removeprefix(PREFIX): n for key, n in counters.values.items() if "fused" in key and n}
    del found["step_seconds/fused/sum"], found["step_seconds/fused/6"]
    assert found == {
        **{"steps_total/fused": 4, "fused_steps_total/sooner": 2, "fused_prefill_tokens_total/sooner": 346},
        **{"fused_steps_total/lane_empty": 1, "fused_prefill_tokens_total/lane_empty": 30},
        **{"fused_steps_total/stock": 1, "fused_prefill_tokens_total/stock": 500},
    }


# --- in an engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slo(start_engine, tiny_model_path):
    return start_engine(tiny_model_path, pdmux={"itl_slo_ms": 0.001})


def page():
    return Page(prometheus_client.generate_latest().decode())


def in_llm(driver):
    """What LLM.get_metrics() says of ours, by name and the label of ours."""
    ours = [one for one in driver.llm.get_metrics() if one.name.startswith(PREFIX)]
    return {(one.name, *(v for k, v in one.labels.items() if k not in ("model_name", "engine"))): one for one in ours}


@pytest.mark.engine
def test_an_engine_shows_how_long_its_steps_took_and_offline_the_same(slo):
    slo.run(ARRIVALS)
    web, llm = page(), in_llm(slo)
    web.assert_whole(tiny_model.LAYERS)
    steps = slo.scheduler.pdmux_trace.steps
    took = {kind: [one.done_s - one.start_s for one in steps if one.kind == kind] for kind in ("decode", "beside")}
    for kind, times in took.items():
        got = web.histograms["step_seconds"][kind]
        assert got.count == len(times) > 5 and got.sum == pytest.approx(sum(times), abs=1e-6 * len(times))
        for le, count in got.buckets.items():
            assert count == pytest.approx(sum(one <= float(le) for one in times), abs=1)
    ratios = web.histograms["beside_prediction_ratio"][""]
    assert 0 < ratios.count <= len(took["beside"]) and ratios.sum > 0
    assert web.of("missed_steps_total") == len(took["beside"])
    assert web.of("lead_layers") == 0 == web.of("dry_seconds_total")  # a CPU has no queue

    types = {"counter": reader.Counter, "gauge": reader.Gauge, "histogram": reader.Histogram}
    assert {(one.name, type(one)) for one in llm.values()} == {
        (metric.name.removesuffix("_total"), types[metric.type]) for metric in metrics(6, True)
    }
    assert llm[PREFIX + "steps", "beside"].value == web.of("steps_total", "beside")
    seconds = {group: llm[PREFIX + "beside_seconds", group].value for group in web.values["beside_seconds_total"]}
    assert seconds == web.values["beside_seconds_total"] and sum(seconds.values()) > 0
    assert llm[PREFIX + "lead_layers",].value == 0
    for kind in ("decode", "fused", "beside"):
        one, shown_there = llm[PREFIX + "step_seconds", kind], web.histograms["step_seconds"][kind]
        assert (one.buckets, one.count, one.sum) == (shown_there.buckets, shown_there.count, shown_there.sum)


@pytest.mark.engine
def test_an_engine_of_stock_vllm_says_vllms_alone(stock, pdmux):
    names = {one.name for one in stock.llm.get_metrics()}
    assert names and all(name.startswith("vllm:") for name in names)
    assert in_llm(pdmux)


@pytest.mark.engine
def test_the_lead_of_the_lanes_queue_is_that_of_its_device(pdmux, monkeypatch):
    assert CudaDevice.lead_layers.fget(SimpleNamespace(_lead=7)) == 7
    monkeypatch.setattr(HostDevice, "lead_layers", 3)
    pdmux.run(ARRIVALS)
    assert pdmux.scheduler._counters.values[PREFIX + "lead_layers"] == 3


class Fusing(TablePolicy):
    """A table that fuses every other time."""

    observes = False
    fuses = True
    fused_reason = SOONER
    asked = 0

    def fused_tokens(self, load):
        Fusing.asked += 1
        return 64 if Fusing.asked % 2 else 0


@pytest.mark.engine
@pytest.mark.parametrize("fusing, reason", [(OffPolicy(6), OFF), (Fusing((), 6, 36, LayerRule(2)), SOONER)])
def test_an_engine_counts_fused_steps_by_what_its_policy_says(pdmux, fusing, reason):
    before = dict(pdmux.scheduler._counters.values)
    pdmux.scheduler._pdmux_policy = fusing
    pdmux.run(ARRIVALS)
    fused = [one for one in pdmux.scheduler.pdmux_trace.steps if one.kind == "fused"]
    values = pdmux.scheduler._counters.values
    found = {key.removeprefix(PREFIX): n - before.get(key, 0) for key, n in values.items()}
    assert found[f"fused_steps_total/{reason}"] == found["steps_total/fused"] == len(fused) > 0
    tokens = sum(one.decode_tokens - one.decode_batch for one in fused)
    assert tokens < found[f"fused_prefill_tokens_total/{reason}"] <= tokens + 2 * len(fused)  # of one or two prompts


@pytest.mark.engine
def test_without_statistics_nothing_is_asked_noted_or_kept(start_engine, tiny_model_path, monkeypatch):
    engine = start_engine(tiny_model_path, pdmux={"itl_slo_ms": 0.001}, disable_log_stats=True)
    slo, outputs = engine.scheduler._pdmux_policy, []
    for name in ("expected_ms", "target_ms"):
        monkeypatch.setattr(slo, name, lambda step: pytest.fail("asked"), raising=True)
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda *args: outputs.append(schedule(*args)) or outputs[-1])
    monkeypatch.setattr(slo, "_paced_by_device", True)  # so that it fuses
    monkeypatch.setattr(slo, "fused_tokens", lambda load: 64 * (len(outputs) % 2))
    engine.run(ARRIVALS)
    assert engine.scheduler._counters is None and engine.scheduler._observer._judge is None
    kinds = [one.kind for one in engine.scheduler.pdmux_trace.steps]
    assert {"fused", "beside"} <= set(kinds), kinds
    assert outputs and not [one for one in outputs if hasattr(one, "pdmux_fused_reason")]
    assert not engine.scheduler._shares._told
