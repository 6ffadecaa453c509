# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: from when it was scheduled, or from when the one before came back if that was later."""

from types import SimpleNamespace

import pytest
from hand_clock import HandClock

from vllm_pdmux.messages import LaneReport, Run
from vllm_pdmux.step_times import StepTimes


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def times(clock):
    return StepTimes(clock)


def scheduled(times, clock, at, tokens=1):
    clock.now_s = at
    output = SimpleNamespace(num_scheduled_tokens={"one": tokens} if tokens else {})
    times.scheduled(output)
    return output


def done(times, clock, output, at, report=None):
    clock.now_s = at
    return times.done(output, report)


def test_steps_that_queue_up_take_what_lies_between_their_outputs(times, clock):
    outputs = [scheduled(times, clock, at) for at in (1.0, 1.1)]
    took = [done(times, clock, output, at) for output, at in zip(outputs, (1.5, 1.8), strict=True)]
    assert [one.ms for one in took] == pytest.approx([500, 300])
    assert [(one.start_s, one.end_s) for one in took] == [(1.0, 1.5), (1.5, 1.8)]


def test_time_with_nothing_to_do_is_nobodys(times, clock):
    took = [done(times, clock, scheduled(times, clock, at), at + 0.02) for at in (1.0, 100.0)]
    assert [one.ms for one in took] == pytest.approx([20, 20])


def test_an_empty_step_that_comes_back_late_takes_nothing_from_the_next(times, clock):
    """The host launches a prompt for 30 ms before it looks for the step before, which had nothing in it."""
    empty, output = scheduled(times, clock, 0.99, tokens=0), scheduled(times, clock, 1.0)
    assert done(times, clock, empty, 1.03) is None
    assert done(times, clock, output, 1.2).ms == pytest.approx(200)


@pytest.mark.parametrize("report", [LaneReport(0, (Run(0, 0, 8),)), LaneReport(0, output=object())])
def test_a_step_with_the_prefill_lane_alone_takes_time(times, clock, report):
    alone = scheduled(times, clock, 1.0, tokens=0)
    assert done(times, clock, alone, 1.5, report).ms == pytest.approx(500)


def test_a_step_that_found_a_batch_with_nothing_left_to_launch_takes_none(times, clock):
    empty = scheduled(times, clock, 1.0, tokens=0)
    assert done(times, clock, empty, 1.5, LaneReport(0)) is None


def test_a_step_that_was_not_seen_when_it_was_scheduled_begins_where_the_last_one_ended(times, clock):
    done(times, clock, scheduled(times, clock, 1.0), 1.5)
    assert done(times, clock, SimpleNamespace(num_scheduled_tokens={"one": 1}), 1.7).ms == pytest.approx(200)
