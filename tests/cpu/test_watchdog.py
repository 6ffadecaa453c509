# SPDX-License-Identifier: Apache-2.0
"""The watchdog: a lane that hangs is noticed, once, and nothing else is."""

import _thread
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_model
from driver import Arrival, prompt
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from vllm_pdmux.worker import watchdog
from vllm_pdmux.worker.watchdog import EXIT, EXIT_STALLED, FAIL, LOG, LONGEST_END_S, THREAD, Watchdog, stacks

ROOT = Path(__file__).parents[2]
HANG_LIMIT_S = 300


class Looked:
    """A watchdog over a lane and a clock that are set by hand."""

    def __init__(self, action=LOG, limit_s=10.0):
        self.progress, self.now_s, self.ended, self.given_up = None, 0.0, [], []
        self.watchdog = Watchdog(
            limit_s,
            action,
            lambda: self.progress,
            lambda: "batch 7",
            lambda progress, stalled_s: self.given_up.append((progress, stalled_s)),
            lambda: self.now_s,
            self.ended.append,
        )

    def at(self, now_s, progress):
        self.now_s, self.progress = now_s, progress
        self.watchdog.look()


def said(caplog):
    # Before vLLM has set its loggers up, a record comes to the handler on two ways.
    records = {id(record): record for record in caplog.records if "no progress" in record.getMessage()}
    return [record.getMessage() for record in records.values()]


def test_a_lane_that_stands_still_is_told_once_with_what_it_does(caplog_vllm):
    looked = Looked()
    for now_s in (0, 5, 9):
        looked.at(now_s, "layer 3")
    assert not said(caplog_vllm)
    for now_s in (10, 15, 20):
        looked.at(now_s, "layer 3")
    (text,) = said(caplog_vllm)
    assert "for 10 s (watchdog_s is 10): batch 7" in text and not looked.ended
    looked.at(21, "layer 4")
    looked.at(26, "layer 4")
    looked.at(31, "layer 4")
    assert len(said(caplog_vllm)) == 2, "another stall is told again"


@pytest.mark.parametrize("progress", [lambda i: None, lambda i: i])
def test_an_idle_lane_and_one_that_goes_on_are_left_alone(caplog_vllm, progress):
    looked = Looked()
    for i in range(50):
        looked.at(i * 9.0, progress(i))
    assert not said(caplog_vllm)


def test_work_that_comes_after_a_long_idle_time_has_all_the_time(caplog_vllm):
    looked = Looked()
    looked.at(0, None)
    looked.at(1000, "layer 0")
    looked.at(1009, "layer 0")
    assert not said(caplog_vllm)


def test_it_ends_the_process_where_it_is_told_to(caplog_vllm):
    looked = Looked(EXIT)
    for now_s in (0, 5, 10, 15):
        looked.at(now_s, "layer 3")
    assert looked.ended == [EXIT_STALLED] and "watchdog_action is exit" in caplog_vllm.text
    assert not looked.given_up


def test_it_gives_up_once_what_it_has_seen_and_ends_the_process_where_nobody_does(caplog_vllm):
    looked = Looked(FAIL)
    for now_s in (0, 5, 10, 15, 19):
        looked.at(now_s, "layer 3")
    assert looked.given_up == [("layer 3", 10)] and not looked.ended
    looked.at(20, "layer 3")
    assert looked.ended == [EXIT_STALLED] and len(looked.given_up) == 1
    assert "no step has come since in which the prefill lane could give up" in caplog_vllm.text


def test_what_was_given_up_ends_no_process(caplog_vllm):
    looked = Looked(FAIL)
    for now_s, progress in ((0, "layer 3"), (5, "layer 3"), (10, "layer 3"), (14, None), (24, None), (34, "layer 0")):
        looked.at(now_s, progress)
    for now_s in (39, 44):
        looked.at(now_s, "layer 0")
    assert looked.given_up == [("layer 3", 10), ("layer 0", 10)] and not looked.ended


@pytest.mark.parametrize("action", [LOG, EXIT])
def test_other_actions_do_not_give_up(caplog_vllm, action):
    looked = Looked(action)
    for now_s in range(0, 60, 5):
        looked.at(now_s, "layer 3")
    assert not looked.given_up and bool(looked.ended) == (action == EXIT)


def test_it_ends_the_process_though_it_cannot_say_what_the_lane_does(caplog_vllm):
    looked = Looked(EXIT)

    def describe():
        raise RuntimeError("changed meanwhile")

    looked.watchdog._describe = describe
    for now_s in (0, 5, 10, 15):
        looked.at(now_s, "layer 3")
    assert looked.ended == [EXIT_STALLED] and "could not be read (RuntimeError: changed meanwhile)" in caplog_vllm.text


def test_time_in_which_the_process_was_stopped_is_no_stall(caplog_vllm):
    looked = Looked(EXIT)
    for now_s in (0, 2.5, 3600):
        looked.at(now_s, "layer 3")
    assert not said(caplog_vllm) and not looked.ended


@pytest.mark.parametrize("limit_s", [1e-9, 1e12])
def test_any_time_may_be_set(limit_s):
    watchdog = Watchdog(limit_s, LOG, lambda: None, str, print)
    watchdog.start()
    time.sleep(0.05)
    assert watchdog._thread.is_alive()
    watchdog.close()
    assert not watchdog._thread.is_alive()


def test_it_goes_on_when_it_cannot_look(caplog_vllm):
    calls = []

    def progress():
        calls.append(1)
        raise RuntimeError("a state that changes meanwhile")

    bound = []
    watchdog = Watchdog(0.04, LOG, progress, str, print, bind=lambda: bound.append(len(calls)))
    watchdog.start()
    while len(calls) < 3:
        time.sleep(0.01)
    watchdog.close()
    assert bound == [0], "its thread is bound to the device before it looks"
    assert "could not look" in caplog_vllm.text
    assert watchdog._thread.name == THREAD and not watchdog._thread.is_alive()


def test_the_stacks_are_those_of_all_other_threads():
    go = threading.Event()

    def waits_in_here():
        go.wait()

    thread = threading.Thread(target=waits_in_here, name="the other one")
    thread.start()
    try:
        text = stacks()
    finally:
        go.set()
        thread.join()
    assert "thread the other one:" in text and "waits_in_here" in text and "in stacks" not in text


def test_each_stack_is_whole_and_under_its_threads_name_or_number():
    """A library's own thread is none of Python's."""
    go, begun, idents = threading.Event(), threading.Semaphore(0), []

    def waits_in_here():
        idents.append(threading.get_ident())
        begun.release()
        go.wait()

    thread = threading.Thread(target=waits_in_here, name="the other one")
    thread.start()
    _thread.start_new_thread(waits_in_here, ())
    try:
        for _ in range(2):
            begun.acquire()
        text = stacks()
    finally:
        go.set()
        thread.join()
    unnamed = next(ident for ident in idents if ident != thread.ident)
    lines = text.splitlines()
    for name in ("the other one", unnamed):
        place = lines.index(f"thread {name}:")
        assert lines[place + 1].startswith('  File "')
    assert f"thread {threading.current_thread().name}:" not in lines and not text.endswith("\n")
    assert 'waits_in_here\n    go.wait()\n  File "' in text, "one call below the other"


def test_it_is_not_waited_for_for_ever_where_its_thread_is_in_a_call_that_does_not_return(monkeypatch):
    looked, waited_s = Looked(), []
    monkeypatch.setattr(looked.watchdog, "_thread", SimpleNamespace(join=waited_s.append))
    looked.watchdog.close()
    assert waited_s == [LONGEST_END_S]


def test_what_it_says_before_it_ends_the_process_is_in_the_log_by_then(monkeypatch):
    """os._exit flushes nothing."""
    said, log = [], logging.getLogger("vllm")
    looked, handler = Looked(EXIT), logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: None)
    monkeypatch.setattr(handler, "flush", lambda: said.append("flushed"))
    monkeypatch.setattr(watchdog.logger, "error", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(log, "handlers", [*log.handlers, handler])
    monkeypatch.setattr(looked.watchdog, "_end", lambda code: said.append(code))
    for now_s in (0, 5, 10):
        looked.at(now_s, "layer 3")
    first, *others = said
    assert first.startswith(
        "PD-multiplexing: the prefill lane has made no progress for 10 s (watchdog_s is 10): batch 7\n"
    )
    assert others == [
        "PD-multiplexing: the process ends, as watchdog_action is exit",
        "flushed",
        EXIT_STALLED,
    ]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
HANGING = """
import os, sys, time
sys.path.insert(0, "tests/cpu")
import tiny_model
from driver import ENGINE, Arrival, Driver, prompt
from vllm import LLM, SamplingParams

settings = {"layers_per_group": 1, "watchdog_s": 1, "watchdog_action": "exit"}
driver = Driver(LLM(model=sys.argv[1], **ENGINE, additional_config={"pdmux": settings}))
lane = driver.worker._prefill_lane
run = lane._lane.advance

def hangs(layers):
    if lane._lane.layer >= 3:
        def in_a_layer():
            time.sleep(1000)
        in_a_layer()
    return run(layers)

lane._lane.advance = hangs
greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
driver.run([Arrival("chat", prompt(20, 1), greedy), Arrival("long", prompt(200, 2), greedy, 5)])
"""


@pytest.mark.engine
@pytest.mark.slow
def test_a_lane_that_hangs_in_a_real_engine_ends_it_with_the_place(tiny_model_path):
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HANGING, tiny_model_path],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
    )
    text = done.stdout + done.stderr
    assert done.returncode == EXIT_STALLED, text[-3000:]
    assert "no progress for" in text and "in_a_layer" in text and "layer 3 of" in text


@pytest.mark.engine
def test_it_looks_on_in_a_real_engine_and_finds_nothing(start_engine, tiny_model_path, caplog_vllm):
    driver = start_engine(tiny_model_path, pdmux={"layers_per_group": 1, "watchdog_s": 60})
    watchdog = driver.worker._watchdog
    driver.run([Arrival("chat", prompt(20, 1), GREEDY), Arrival("long", prompt(200, 2), GREEDY, 5)])
    assert watchdog._progress() is None
    driver.add(Arrival("chat", prompt(20, 3), GREEDY))
    for _ in range(3):
        driver.engine.step()
    driver.add(Arrival("long", prompt(200, 4), GREEDY))
    seen = []
    while driver.engine.has_unfinished_requests():
        driver.engine.step()
        seen.append(watchdog._progress())
    assert len({one for one in seen if one is not None}) >= tiny_model.LAYERS - 1 and seen[-1] is None
    assert "no progress" not in caplog_vllm.text


@pytest.mark.engine
def test_a_paused_engine_has_nothing_in_its_lane(pdmux):
    """A pause drops the batch, and the worker is told, though there is nothing else to do: else it would be a stall."""
    pdmux.set_layers_per_group(1)
    pdmux.add(Arrival("chat", prompt(20, 1), GREEDY))
    for _ in range(3):
        pdmux.engine.step()
    pdmux.add(Arrival("long", prompt(200, 2), GREEDY))
    while not (pdmux.in_lane("long") and pdmux.layer() == 3):
        pdmux.engine.step()
    lane = pdmux.worker._prefill_lane
    assert lane.progress() is not None
    pdmux.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while pdmux.scheduler.has_requests():
        pdmux.core.step()
    assert lane.progress() is None and not pdmux.scheduler.has_unfinished_requests()
    pdmux.scheduler.set_pause_state(PauseState.UNPAUSED)
    while pdmux.engine.has_unfinished_requests():
        pdmux.engine.step()
