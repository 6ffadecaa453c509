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
