# SPDX-License-Identifier: Apache-2.0
"""The lane alone, without an engine: suspension, dropping, and signals."""

import os
import signal
import threading
import time

import pytest

from vllm_pdmux.worker.lane import SerialLane, ThreadedLane


@pytest.fixture(params=[True, False], ids=["long-lived thread", "a thread for each job"])
def lane(request):
    lane = ThreadedLane(switch_in=lambda: None, switch_out=lambda: None, keep_thread=request.param)
    yield lane
    lane.close()
    assert "pdmux-prefill" not in {thread.name for thread in threading.enumerate()}


def layers(lane, count, seen):
    for layer in range(count):
        lane.at_layer()
        seen.append(layer)
    return "done"


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 100])
def test_a_job_stops_where_its_layers_end(lane, stride):
    seen = []
    lane.start(lambda: layers(lane, 5, seen))
    advances = 0
    while not lane.advance(stride):
        advances += 1
        assert seen == list(range(advances * stride)) and lane.layer == advances * stride
    assert seen == list(range(5)) and lane.take() == "done"


def test_jobs_follow_each_other(lane):
    for _ in range(3):
        lane.start(lambda: layers(lane, 2, []))
        assert not lane.advance(1) and lane.advance(1) and lane.take() == "done"


def test_what_a_job_raises_comes_out_where_its_result_would(lane):
    def job():
        lane.at_layer()
        raise RuntimeError("in the job")

    lane.start(job)
    assert lane.advance(1)
    with pytest.raises(RuntimeError, match="in the job"):
        lane.take()


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_dropped_job_unwinds_and_runs_no_further(lane, layer):
    seen, unwound = [], []

    def job():
        try:
            return layers(lane, 5, seen)
        finally:
            unwound.append(True)

    lane.start(job)
    lane.advance(layer)
    lane.drop()
    assert seen == list(range(layer)) and bool(unwound) == (layer > 0)
    lane.start(lambda: layers(lane, 1, seen))
    assert lane.advance(1) and lane.take() == "done"


def test_only_the_lanes_own_thread_counts_layers(lane):
    lane.start(lambda: layers(lane, 2, []))
    lane.advance(1)
    lane.at_layer()
    assert lane.layer == 1
    lane.drop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_handler_raises_while_layers_run(lane, number):
    """As vLLM's handlers do: the exception comes out when the job has stopped, and the lane can be closed."""
    seen = []

    def job():
        for layer in range(4):
            lane.at_layer()
            if layer == 1:
                os.kill(os.getpid(), number)
                time.sleep(0.2)  # the handler runs on the main thread meanwhile
            seen.append(layer)

    def handler(*_):
        raise SystemExit

    before = signal.signal(number, handler)
    try:
        lane.start(job)
        with pytest.raises(SystemExit):
            lane.advance(2)
    finally:
        signal.signal(number, before)
    assert seen == [0, 1], "control came back while the job ran"


def test_the_serial_lane_runs_it_all():
    lane, seen = SerialLane(), []
    lane.start(lambda: layers(lane, 5, seen))
    assert lane.advance(1) and lane.take() == "done" and seen == list(range(5)) and lane.layer == 5


def test_layers_outside_of_a_job_are_nobodys():
    """Of a warm-up, on the thread that has the lanes."""
    lane = SerialLane()
    lane.at_layer()
    assert lane.layer == 0
    lane.start(lambda: layers(lane, 2, []))
    lane.at_layer()
    assert lane.layer == 0 and lane.take() == "done" and lane.layer == 2
    lane.at_layer()
    assert lane.layer == 2


def test_its_thread_keeps_no_process_alive(lane):
    """A layer may never return."""
    lane.start(lambda: layers(lane, 2, []))
    lane.advance(1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pdmux-prefill"]
    assert thread.daemon
    lane.drop()


@pytest.mark.parametrize("keeps", [True, False])
def test_only_a_lane_that_keeps_its_thread_has_it_after_a_job(keeps):
    lane = ThreadedLane(switch_in=lambda: None, switch_out=lambda: None, keep_thread=keeps)
    idents = set()
    for _ in range(2):
        lane.start(lambda: idents.add(threading.current_thread()))
        assert lane.advance(1)
        lane.take()
        assert ("pdmux-prefill" in {thread.name for thread in threading.enumerate()}) == keeps
    assert len(idents) == 2 - keeps
    lane.close()


def test_there_is_one_job_at_a_time(lane):
    lane.start(lambda: layers(lane, 2, []))
    with pytest.raises(AssertionError, match=r"^the lane has a job already$"):
        lane.start(lambda: None)
    with pytest.raises(AssertionError, match=r"^the job has not ended$"):
        lane.take()
    lane.drop()
    with pytest.raises(AssertionError, match=r"^the lane has no job$"):
        lane.advance(1)
