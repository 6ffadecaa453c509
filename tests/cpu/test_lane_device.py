# SPDX-License-Identifier: Apache-2.0
"""The order of streams and the pace of launches on a GPU, with stand-ins for streams and events."""

import functools
from types import SimpleNamespace

import pytest
from hand_clock import HandClock

from vllm_pdmux.worker import lane_device
from vllm_pdmux.worker.lane_device import FIRST_LEAD, LONGEST_LEAD, MARGIN, CudaDevice, HostDevice


class Stream:
    def __init__(self, name):
        self.name, self.waited_for, self.device = name, [], 0

    def wait_stream(self, other):
        self.waited_for.append(other.name)

    def wait_event(self, event):
        self.waited_for.append((event.stream.name, event.number))


class Event:
    made = 0

    def __init__(self):
        Event.made += 1
        self.number = Event.made
        self.done, self.stream = False, None

    def record(self, stream):
        self.done, self.stream = False, stream

    def query(self):
        return self.done


@pytest.fixture
def streams(monkeypatch):
    """The decode stream and those of the prefill lane by group."""
    Event.made = 0
    monkeypatch.setattr(lane_device.torch.cuda, "Event", Event)
    decode = Stream("decode")
    return decode, {0: decode, 1: Stream("prefill 1"), 2: Stream("prefill 2")}


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def device(streams, clock):
    return CudaDevice(*streams, clock)


@pytest.fixture
def set_on_thread(monkeypatch):
    """What became current on the lane's thread, in order."""
    calls = []
    monkeypatch.setattr(lane_device.torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(lane_device.torch.cuda, "set_stream", lambda stream: calls.append(stream.name))
    return calls


def begin(device, group):
    """A batch begins in `group`, as the lane does it; the runner that the device was given."""
    if isinstance(getattr(device, "_clock_s", None), HandClock):
        device._clock_s.now_s += 1.0  # a step of its own
    runner = SimpleNamespace()
    device.use(group, runner)
    device.begin(device.moment())
    return runner


def gpu_runs(device, layers):
    for mark in list(device._marks)[:layers]:
        mark.done = True


def step(device, clock, group=1, limit=100, launch_s=0.0, step_s=1.0):
    """A step of the engine: launch layers as the lane does, `limit` at most; how many."""
    clock.now_s += step_s
    device.use(group, SimpleNamespace())
    count = 0
    while count < limit and device.wants_more():
        device.mark()
        clock.now_s += launch_s
        count += 1
    return count


def learn_longest_lead(device, clock, step_s=1.0):
    """A batch whose queue is dry in every step."""
    begin(device, 1)
    for _ in range(20):
        step(device, clock, step_s=step_s)
        gpu_runs(device, 1000)


def test_a_batch_is_ordered_behind_the_decode_steps_and_the_batch_before(device, streams):
    _, prefill = streams
    begin(device, 1)
    assert prefill[1].waited_for == ["prefill 2", ("decode", 1)]
    begin(device, 2)
    assert prefill[2].waited_for == ["prefill 1", ("decode", 2)]


def test_a_batch_on_the_stream_of_the_one_before_is_ordered_behind_the_decode_steps_alone(device, streams):
    _, prefill = streams
    begin(device, 2)
    begin(device, 2)
    assert prefill[2].waited_for == [("decode", 1), ("decode", 2)]


def test_a_batch_does_not_wait_for_decode_steps_that_came_after_it_was_admitted(device, streams):
    decode, prefill = streams
    admitted = device.moment()
    device.use(2, SimpleNamespace())
    device.moment().record(decode)  # later steps
    device.begin(admitted)
    assert prefill[2].waited_for == [("decode", admitted.number)]


def test_the_decode_stream_waits_where_a_batch_is_dropped_and_nowhere_else(device, streams, clock):
    decode, _ = streams
    begin(device, 1)
    step(device, clock, 1)
    step(device, clock, 2)
    assert decode.waited_for == []
    device.drop()
    assert decode.waited_for == ["prefill 2"]


@pytest.mark.parametrize(("group", "stream"), [(0, "decode"), (1, "prefill 1"), (2, "prefill 2"), (6, "prefill 2")])
def test_every_group_has_a_stream(device, group, stream):
    assert begin(device, group).main_stream.name == stream


class TestTheDecodeStreamItself:
    """Group 0, where nothing decodes."""

    def test_it_never_waits_for_itself(self, device, streams):
        decode, _ = streams
        begin(device, 0)
        begin(device, 0)
        assert decode.waited_for == ["prefill 2"], "the stream that the lane had before, once"

    def test_a_batch_that_is_dropped_on_it_needs_no_wait(self, device, streams):
        decode, _ = streams
        begin(device, 0)
        before = list(decode.waited_for)
        device.drop()
        assert decode.waited_for == before

    def test_a_batch_that_leaves_it_runs_behind_it(self, device, streams):
        _, prefill = streams
        begin(device, 0)
        device.use(1, SimpleNamespace())
        assert prefill[1].waited_for == ["decode"]


class TestAChangeOfGroupBetweenTwoLayers:
    def test_the_new_stream_is_ordered_behind_the_old_one_once(self, device, streams):
        _, prefill = streams
        runner = begin(device, 1)
        device.mark()
        for _ in range(3):
            device.use(2, runner)
            device.mark()
        assert prefill[2].waited_for == ["prefill 1"]

    def test_the_runner_and_the_layers_have_the_new_stream(self, device, streams):
        _, prefill = streams
        runner = begin(device, 1)
        device.mark()
        device.use(2, runner)
        device.mark()
        assert runner.main_stream is prefill[2]
        assert [mark.stream for mark in device._marks] == [prefill[1], prefill[2]]

    def test_groups_on_one_stream_wait_for_nothing(self, streams):
        shared = Stream("shared")
        device = CudaDevice(Stream("decode"), {1: shared, 2: shared})
        runner = begin(device, 1)
        device.use(2, runner)
        assert shared.waited_for == [("decode", 1)] and runner.main_stream is shared

    def test_a_runner_that_kept_a_stream_gets_the_new_one(self, device, streams):
        class Runner:
            @functools.cached_property
            def main_stream(self):
                return "the stream of its first use"

        runner = Runner()
        assert runner.main_stream == "the stream of its first use"
        device.use(1, runner)
        assert runner.main_stream is streams[1][1]


class TestTheStreamOfTheLanesThread:
    def test_it_is_set_when_the_thread_goes_on_and_not_before(self, device, set_on_thread):
        begin(device, 1)
        assert set_on_thread == []
        device.enter()
        assert set_on_thread == [0, "prefill 1"]

    def test_it_is_not_set_again_when_nothing_changed(self, device, set_on_thread):
        runner = begin(device, 1)
        for _ in range(3):
            device.enter()
            device.use(1, runner)
        assert set_on_thread == [0, "prefill 1"]

    def test_a_new_batch_sets_it_whatever_ran_on_the_thread_before(self, device, set_on_thread):
        for _ in range(2):
            begin(device, 1)
            device.enter()
        assert set_on_thread == [0, "prefill 1"] * 2

    def test_it_follows_every_change(self, device, set_on_thread):
        runner = begin(device, 1)
        device.enter()
        for group in (2, 0, 1):
            device.use(group, runner)
            device.enter()
        assert set_on_thread[1::2] == ["prefill 1", "prefill 2", "decode", "prefill 1"]


class TestTheLead:
    """How many layers are queued."""

    def test_a_little_more_is_queued_than_the_gpu_begins(self, device, clock):
        begin(device, 1)
        assert step(device, clock) == FIRST_LEAD
        assert step(device, clock) == 0, "nothing has begun: nothing is launched"
        gpu_runs(device, 1)
        assert step(device, clock) == 1 + MARGIN - FIRST_LEAD + 1

    def test_it_is_what_the_gpu_begins_in_a_step_and_a_margin(self, device, clock):
        begin(device, 1)
        for _ in range(20):
            step(device, clock)
            gpu_runs(device, 5)
        step(device, clock)
        assert len(device._marks) == 5 + MARGIN

    def test_it_stays_there(self, device, clock):
        begin(device, 1)
        queued = []
        for _ in range(30):
            step(device, clock)
            queued.append(len(device._marks))
            gpu_runs(device, 5)
        assert set(queued[-10:]) == {5 + MARGIN}

    def test_it_grows_when_the_queue_has_run_dry_within_a_bound(self, device, clock):
        begin(device, 1)
        launched = []
        for _ in range(20):
            launched.append(step(device, clock))
            gpu_runs(device, 1000)
        assert launched[:4] == [2, 3, 4, 6] and launched[-1] == LONGEST_LEAD

    def test_it_shrinks_step_by_step_when_layers_take_longer(self, device, clock):
        learn_longest_lead(device, clock)
        queued = []
        for _ in range(2 * LONGEST_LEAD):
            step(device, clock)
            queued.append(len(device._marks))
            gpu_runs(device, 1)
        assert queued == sorted(queued, reverse=True) and queued[-1] == 1 + MARGIN

    def test_a_batch_begins_with_a_layer_whatever_is_queued(self, device, clock):
        begin(device, 1)
        step(device, clock)
        assert step(device, clock) == 0
        begin(device, 1)
        assert step(device, clock) == 1 and step(device, clock) == 0

    def test_a_batch_with_no_layers_left_says_nothing(self, device, clock):
        begin(device, 1)
        for _ in range(5):
            step(device, clock, limit=1)
            gpu_runs(device, 1000)
        assert step(device, clock) == FIRST_LEAD

    def test_the_host_launches_for_a_part_of_a_step_only(self, device, clock):
        learn_longest_lead(device, clock)
        launched = []
        for _ in range(4):
            launched.append(step(device, clock, launch_s=0.1, step_s=0.2))
            gpu_runs(device, 1000)
        # A step takes its launches and 0.2 s; half of that, and the layer that is under way when it is over.
        assert min(launched) >= 1 and max(launched) <= 3


def test_the_host_stops_when_its_part_of_a_step_is_over(device, clock):
    learn_longest_lead(device, clock)
    for _ in range(2):
        step(device, clock, limit=0, step_s=1.0)
    # A half of a step of 1 s: the fifth layer of 0.125 s would begin when it is over.
    assert step(device, clock, step_s=1.0, launch_s=0.125) == 4


def test_it_is_asked_before_each_layer(device):
    assert device.stride(7) == 1


def test_a_layer_is_launched_in_every_step_however_short(device, clock):
    begin(device, 1)
    launched = []
    for _ in range(5):
        launched.append(step(device, clock, step_s=0.0, launch_s=0.1))
        gpu_runs(device, 1000)
    assert min(launched) >= 1


def test_events_are_used_again(device, clock):
    device.use(1, SimpleNamespace())
    device.begin(device.moment())
    for _ in range(50):
        step(device, clock)
        gpu_runs(device, 1000)
    assert Event.made <= 1 + 2 * LONGEST_LEAD


def test_time_with_nothing_to_do_is_no_step(device, clock):
    learn_longest_lead(device, clock, step_s=0.004)
    # Ten seconds without a batch; then half of a step of 4 ms has room for four layers.
    assert step(device, clock, step_s=10.0, launch_s=0.0005) <= 5


def test_a_result_without_an_event_is_there(device):
    assert device.is_done(SimpleNamespace(sampled_token_ids=[[1]]))


@pytest.mark.parametrize("name", ["copy_event", "async_copy_ready_event"])
def test_a_result_of_either_runner_can_be_read_when_its_copy_is_done(device, name):
    event = Event()
    output = SimpleNamespace(**{name: event})
    assert not device.is_done(output)
    event.done = True
    assert device.is_done(output)


def test_the_end_of_the_lane_is_the_end_of_what_it_has_queued_and_nobody_waits_for_it(device, streams):
    decode, by_group = streams
    begin(device, 2)
    end = device.end()
    assert end.stream is by_group[2] and not end.query() and decode.waited_for == []


def test_a_cpu_has_run_what_it_was_given():
    device = HostDevice()
    assert device.end().query()
    runner = begin(device, 3)
    assert device.stride(7) == 7 and device.wants_more() and device.is_done(object()) and not device.keep_thread
    assert not hasattr(runner, "main_stream")


def test_the_lanes_of_a_gpu_have_scratch_of_their_own(device):
    assert device.workspace != HostDevice().workspace == 0
