# SPDX-License-Identifier: Apache-2.0
"""The order of streams and the pace of launches on a GPU, with stand-ins for streams and events."""

from types import SimpleNamespace

import pytest

from vllm_pdmux.worker import lane_device
from vllm_pdmux.worker.lane_device import FIRST_LEAD, LONGEST_LEAD, CudaDevice, HostDevice


class Stream:
    def __init__(self, name):
        self.name, self.waited_for, self.device = name, [], 0

    def wait_stream(self, other):
        self.waited_for.append(other.name)


class Event:
    made = 0

    def __init__(self):
        Event.made += 1
        self.done = False

    def record(self, stream):
        self.done = False

    def query(self):
        return self.done


@pytest.fixture
def streams(monkeypatch):
    Event.made = 0
    monkeypatch.setattr(lane_device.torch.cuda, "Event", Event)
    return Stream("decode"), {1: Stream("prefill 1"), 2: Stream("prefill 2")}


@pytest.fixture
def device(streams):
    return CudaDevice(*streams)


def gpu_runs(device, layers):
    for mark in list(device._marks)[:layers]:
        mark.done = True


def launch(device, limit=100):
    """Launch layers as the lane does; how many."""
    count = 0
    while count < limit and device.wants_more():
        device.mark()
        count += 1
    return count


def test_a_batch_is_ordered_behind_the_decode_steps_and_the_batch_before(device, streams):
    _, prefill = streams
    runner = SimpleNamespace()
    device.begin(2, runner)
    assert prefill[2].waited_for == ["prefill 1", "decode"] and runner.main_stream is prefill[2]
    device.begin(1, runner)
    assert prefill[1].waited_for == ["prefill 2", "decode"] and runner.main_stream is prefill[1]


def test_the_decode_stream_waits_where_a_batch_is_dropped_and_nowhere_else(device, streams):
    decode, _ = streams
    device.begin(2, SimpleNamespace())
    launch(device)
    assert decode.waited_for == []
    device.drop()
    assert decode.waited_for == ["prefill 2"]


@pytest.mark.parametrize(("group", "stream"), [(0, "prefill 1"), (1, "prefill 1"), (2, "prefill 2"), (6, "prefill 2")])
def test_every_group_has_a_stream(device, group, stream):
    runner = SimpleNamespace()
    device.begin(group, runner)
    assert runner.main_stream.name == stream


def test_a_little_more_is_queued_than_the_gpu_runs(device):
    device.begin(1, SimpleNamespace())
    assert launch(device) == FIRST_LEAD
    assert launch(device) == 0, "nothing has run: nothing is launched"
    gpu_runs(device, 1)
    assert launch(device) == 1


def test_a_queue_that_ran_dry_is_kept_longer_within_a_bound(device):
    device.begin(1, SimpleNamespace())
    launched = []
    for _ in range(3 * LONGEST_LEAD):
        launched.append(launch(device))
        gpu_runs(device, 1000)
    assert launched[:3] == [FIRST_LEAD, FIRST_LEAD + 1, FIRST_LEAD + 2] and launched[-1] == LONGEST_LEAD


def test_events_are_used_again(device):
    for _ in range(50):
        device.begin(1, SimpleNamespace())
        launch(device)
        gpu_runs(device, 1000)
    assert Event.made <= 2 * LONGEST_LEAD


def test_a_result_can_be_read_when_its_copy_is_done(device):
    output = SimpleNamespace(copy_event=Event())
    assert not device.is_done(output)
    output.copy_event.done = True
    assert device.is_done(output)


def test_a_cpu_has_run_what_it_was_given():
    device = HostDevice()
    assert device.stride(7) == 7 and device.wants_more() and device.is_done(object()) and not device.keep_thread
