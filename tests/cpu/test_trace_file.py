# SPDX-License-Identifier: Apache-2.0
"""The file of a trace: what a viewer shows is what ran, and a file that cannot be written harms nobody."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_model
from driver import Arrival, prompt
from hand_clock import HandClock
from vllm import SamplingParams

from vllm_pdmux.messages import LaneReport, PrefillOrder, Run
from vllm_pdmux.step_times import StepTime
from vllm_pdmux.trace import StepTrace
from vllm_pdmux.trace_file import TraceFile, TraceFileError, path_of_engine


@pytest.fixture
def said():
    return []


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def trace(path, said, clock):
    file = TraceFile(path, said.append, clock_s=clock)
    yield StepTrace(0, [file.add]), file
    file.close()


def step(*tokens):
    scheduled = {f"r{i}": n for i, n in enumerate(tokens)}
    return SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(tokens))


def batch(**tokens):
    return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))


def shown(path, phase):
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def test_steps_layers_and_batches_are_where_they_ran(trace, path):
    steps, file = trace
    start = PrefillOrder(3, 4, group=2, start=batch(long=200, other=100))
    steps.record(step(1, 1), StepTime(1.0, 1.01), start, LaneReport(3, (Run(3, 0, 4),)))
    ended = LaneReport(3, (Run(3, 4, 8), Run(4, 0, 0)), output=object())
    steps.record(step(1, 1), StepTime(1.01, 1.03), PrefillOrder(3, 4, group=2), ended)
    steps.record(step(1, 1, 1), StepTime(1.03, 1.04), PrefillOrder(), None)
    file.close()
    spans = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in shown(path, "X")]
    assert spans == [
        (1, "beside, 2 requests", 1e6, 1e4),
        (2, "batch 3, layers 0 to 3", 1e6, 1e4),
        (1, "beside, 2 requests", 1.01e6, 2e4),
        (2, "batch 3, layers 4 to 7", 1.01e6, 2e4),
        (1, "decode, 3 requests", 1.03e6, 1e4),
    ]
    (begun,), (over,) = shown(path, "b"), shown(path, "e")
    assert (begun["id"], begun["ts"], over["id"], over["ts"]) == (3, 1e6, 3, 1.03e6)
    assert begun["args"] == {"tokens": 300, "requests": ["long", "other"], "and_more": 0}
    assert over["args"] == {"result": "ended"}
    assert {event["args"]["name"] for event in shown(path, "M")} == {
        "vllm_pdmux",
        "decode lane",
        "prefill lane: layers launched",
    }


def test_a_batch_that_fails_or_is_dropped_ends_too(trace, path):
    steps, file = trace
    for batch_id in (0, 1, 2):
        begin = PrefillOrder(batch_id, 4, group=1, start=batch(**{f"p{batch_id}": 50}))
        steps.record(step(1), StepTime(batch_id, batch_id + 0.5), begin, LaneReport(batch_id))
    steps.record(step(1), StepTime(5, 6), PrefillOrder(2, 4, group=1), LaneReport(0, error="ValueError: no"))
    steps.record(step(1), StepTime(7, 8), PrefillOrder(2, 4, group=1, drop=1), LaneReport(2))
    file.close()
    assert [(one["id"], one["args"]["result"]) for one in shown(path, "e")] == [(0, "ValueError: no"), (1, "dropped")]
    in_lane = [event["args"]["batches"] for event in shown(path, "C") if event["name"] == "batches in lane"]
    assert in_lane == [1, 2, 3, 2, 1]


def test_what_a_process_that_is_killed_has_written_is_a_trace_but_for_its_end(trace, path, clock):
    steps, file = trace
    for second in range(5):
        clock.now_s = float(second)
        steps.record(step(1), StepTime(second, second + 0.5), PrefillOrder(), None)
    clock.now_s = 10.0
    file.add(steps_record(steps))
    assert len(json.loads(path.read_text() + "]")) > 10


def steps_record(steps):
    kept = StepTrace(1)
    kept.record(step(1), StepTime(9.0, 9.5), PrefillOrder(), None)
    return kept.steps[0]


def test_a_file_that_has_become_too_large_ends_whole_and_says_so(path, said, clock):
    file = TraceFile(path, said.append, most_bytes=1500, clock_s=clock)
    for _ in range(100):
        file.add(steps_record(None))
    file.close()
    assert len(said) == 1 and f"trace_file {path} ends here: it is as large as it may become" in said[0]
    assert 500 < path.stat().st_size <= 1500
    assert json.loads(path.read_text() + "]")


def test_a_full_disk_ends_the_trace_and_nothing_else(said, clock):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = TraceFile(full, said.append, clock_s=clock)
    unflushed = TraceFile(full, said.append, clock_s=clock)
    unflushed.close()
    assert len(said) == 1 and "trace_file /dev/full has lost its end: No space left on device" in said.pop()
    for second in range(1, 5):
        clock.now_s = float(second)
        file.add(steps_record(None))
    file.close()
    assert len(said) == 1 and "trace_file /dev/full ends here: No space left on device" in said[0]


def test_an_end_that_cannot_be_written_is_said_and_closing_goes_on(path, said, clock, monkeypatch):
    file = TraceFile(path, said.append, clock_s=clock)

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "_file", SimpleNamespace(write=full, close=lambda: None))
    file.close()
    file.close()
    assert len(said) == 1 and "ends here: No space left on device" in said[0]


def test_a_file_that_cannot_be_opened_is_an_error_that_names_the_setting(tmp_path, said):
    with pytest.raises(TraceFileError, match=r"trace_file is .*/nowhere/trace.json but cannot be written .*: name a"):
        TraceFile(tmp_path / "nowhere" / "trace.json", said.append)


def test_each_of_several_engines_has_a_file(tmp_path):
    for name, second in (("steps.json", "steps.engine1.json"), ("steps", "steps.engine1")):
        assert path_of_engine(tmp_path / name, 0) == tmp_path / name
        assert path_of_engine(tmp_path / name, 1) == tmp_path / second


@pytest.mark.parametrize("path", ["/dev/null", ".", "/"])
def test_what_is_no_file_is_the_same_for_all_engines(path):
    assert path_of_engine(Path(path), 1) == Path(path)


@pytest.mark.engine
def test_an_engine_writes_what_it_did(start_engine, tiny_model_path, path):
    engine = start_engine(tiny_model_path, pdmux={"layers_per_group": 2, "trace_file": str(path), "trace_steps": 4096})
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.run([Arrival("chat", prompt(20, 1), greedy), Arrival("long", prompt(200, 2), greedy, 8)])
    steps = engine.scheduler.pdmux_trace.steps
    engine.scheduler.shutdown()
    names = [event["name"] for event in shown(path, "X")]
    launched = [name for name in names if "layers" in name]
    assert len(launched) == -(-tiny_model.LAYERS // 2)
    assert len(names) - len(launched) == len(steps)
    assert len(shown(path, "b")) == len(shown(path, "e")) == 1
    assert shown(path, "e")[0]["args"] == {"result": "ended"}
