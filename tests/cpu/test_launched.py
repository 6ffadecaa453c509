# SPDX-License-Identifier: Apache-2.0
"""Which step reports that a batch has ended."""

import threading
from types import SimpleNamespace

import pytest
from stand_ins import Later
from vllm.v1.outputs import ModelRunnerOutput

from vllm_pdmux.messages import LaneReport, Run, report_of
from vllm_pdmux.worker.launched import Launched, LaunchedBatches, PendingReport
from vllm_pdmux.worker.worker import ReportingOutput


def launched(batch_id, step=1, error=None):
    return Launched(SimpleNamespace(id=batch_id), step, SimpleNamespace(done=False, of=batch_id), error)


@pytest.fixture
def batches():
    return LaunchedBatches(lambda output: output.done)


def test_a_batch_is_reported_when_it_has_ended_and_once(batches):
    one = launched(0)
    batches.add(one)
    assert batches.take(1, None) is None and len(batches) == 1
    one.output.done = True
    assert batches.take(2, None) is one
    assert batches.take(2, None) is None and not len(batches)


def test_batches_are_reported_in_order(batches):
    first, second = launched(0), launched(1)
    batches.add(first)
    batches.add(second)
    second.output.done = True
    assert batches.take(1, None) is None
    first.output.done = True
    assert [batches.take(step, None) for step in (2, 3)] == [first, second]


def test_a_batch_is_not_reported_before_its_last_layers(batches):
    """The step before the one that launched them may be waited for later, on another thread."""
    one = launched(0, step=5)
    one.output.done = True
    batches.add(one)
    assert batches.take(4, None) is None and batches.take(5, None) is one


def test_one_that_is_awaited_is_reported_though_it_has_not_ended_but_no_other(batches):
    first, second = launched(0), launched(1)
    batches.add(first)
    batches.add(second)
    assert batches.take(1, second) is None
    assert batches.take(1, first) is first
    assert batches.take(2, first) is None  # reported already: its step waits for nothing else


def test_one_that_raised_is_reported_at_once(batches):
    one = launched(0, error="ValueError: no")
    batches.add(one)
    assert batches.take(1, None) is one


def test_those_that_are_dropped_are_not_reported(batches):
    for batch_id in range(3):
        batches.add(launched(batch_id, error="x"))
    batches.drop(1)
    assert [one.batch.id for one in batches.all()] == [2]


def test_each_is_reported_once_though_another_thread_asks(batches):
    taken, stop = [], threading.Event()

    def ask():
        step = 0
        while not stop.is_set() or len(batches):
            step += 1
            if (one := batches.take(10**6, None)) is not None:
                taken.append(one.batch.id)

    thread = threading.Thread(target=ask)
    thread.start()
    for batch_id in range(2000):
        one = launched(batch_id)
        one.output.done = True
        batches.add(one)
        batches.drop(-1)
    stop.set()
    thread.join()
    assert taken == list(range(2000))


def test_a_batch_that_ends_during_a_step_is_reported_with_it():
    """Not with the step that is launched next, whose output comes a step later."""
    step = Later(ModelRunnerOutput(req_ids=[], req_id_to_index={}))
    first_token = Later(ModelRunnerOutput(req_ids=["long"], req_id_to_index={"long": 0}))
    is_over = []
    step.get_output = lambda: is_over.append(True) or step._output
    batches = LaunchedBatches(lambda output: output is first_token and is_over)
    batches.add(Launched(SimpleNamespace(id=7), 1, first_token, None))
    runs = (Run(8, 0, 2),)
    reporting = ReportingOutput(step, PendingReport(LaneReport(8, runs), 1, None, batches), unconfined_steps=3)
    assert len(batches) == 1  # it has not ended when the step is launched
    report = report_of(reporting.get_output())
    assert report == LaneReport(7, runs, output=first_token._output, unconfined_steps=3)
    assert report.output.req_ids == ["long"] and not len(batches)


def test_a_step_in_which_no_batch_has_ended_reports_what_else_is_known_by_then(batches):
    pending = PendingReport(LaneReport(8, (Run(8, 0, 2),)), 1, None, batches)
    assert pending.whole(unconfined_steps=3) == LaneReport(8, (Run(8, 0, 2),), unconfined_steps=3)
