# SPDX-License-Identifier: Apache-2.0
"""A decode step is left out where a batch is about to end, so that the next one has its requests."""

from types import SimpleNamespace

import pytest
from model_check import Plan, Run, Schedule

from vllm_pdmux.ending import PACE_STEPS, REST_LAYERS, EndInSight
from vllm_pdmux.messages import LaneReport, order_of
from vllm_pdmux.worker.lane_device import HostDevice
from vllm_pdmux.worker.launched import Launched, LaunchedBatches, PendingReport


def report(begun, ending=None, is_saturated=True):
    return LaneReport(7, begun_layers=begun, ending=ending, is_saturated=is_saturated)


class TestEndInSight:
    def test_nothing_is_near_before_the_pace_is_known(self):
        sight = EndInSight()
        assert not sight.is_near(7)
        sight.reported(report(0, (7, 0)), True)
        assert not sight.is_near(7), "the device has begun nothing"
        sight.reported(report(2, (7, 0)), True)
        assert sight.is_near(7) and not sight.is_near(8)

    def test_it_is_near_where_the_rest_is_less_than_the_device_begins_in_a_step(self):
        for left, pace in ((1, 2), (2, 2), (3, 4), (4, 4), (0, 1)):
            sight = EndInSight()
            for step in range(1, 4):
                sight.reported(report(step * pace, (7, left)), True)
            assert sight.is_near(7) == (left + REST_LAYERS <= pace)

    def test_the_last_report_counts(self):
        sight = EndInSight()
        sight.reported(report(3, (7, 1)), True)
        assert sight.is_near(7)
        sight.reported(report(6), True)
        assert not sight.is_near(7), "there is no batch of which all is launched"

    def test_the_pace_is_the_mean_of_the_last_steps(self):
        sight, begun = EndInSight(), 0
        for pace in (9, *[1, 3] * (PACE_STEPS // 2)):
            begun += pace
            sight.reported(report(begun, (7, 1)), True)
        assert sight.is_near(7)
        sight.reported(report(begun + 1, (7, 2)), True)
        assert not sight.is_near(7), "the nine are forgotten"

    def test_a_step_in_which_the_queue_ran_dry_says_nothing_of_the_pace(self):
        sight = EndInSight()
        sight.reported(report(4, (7, 2)), True)
        sight.reported(report(5, (7, 2), is_saturated=False), True)
        assert sight.is_near(7)

    def test_what_has_begun_in_a_step_without_decode_is_of_the_next_one(self):
        sight = EndInSight()
        sight.reported(report(4, (7, 2)), True)
        sight.reported(report(5, (7, 2)), False)
        sight.reported(report(8, (7, 3)), True)
        assert sight.is_near(7), "four layers in each"


class TestWhatReportsSay:
    def whole(self, batches):
        return PendingReport(LaneReport(0), 9, None, batches).whole()

    def launched(self, batch_id, end_layers, is_done=False, step=1):
        output = SimpleNamespace(is_done=is_done)
        return Launched(SimpleNamespace(id=batch_id), step, output, None, end_layers)

    def test_of_the_first_batch_of_which_all_is_launched_what_has_not_begun(self):
        batches = LaunchedBatches(lambda output: output.is_done, lambda: 30)
        assert self.whole(batches).ending is None and self.whole(batches).begun_layers == 30
        batches.add(self.launched(4, 32))
        batches.add(self.launched(5, 64))
        assert self.whole(batches).ending == (4, 2)

    def test_of_the_next_one_where_the_first_has_ended(self):
        batches = LaunchedBatches(lambda output: output.is_done, lambda: 33)
        batches.add(self.launched(4, 32, is_done=True))
        batches.add(self.launched(5, 64))
        said = self.whole(batches)
        assert said.ended and said.batch_id == 4 and said.ending == (5, 31)

    def test_one_whose_last_layers_are_of_a_later_step_too(self):
        batches = LaunchedBatches(lambda output: output.is_done, lambda: 40)
        batches.add(self.launched(4, 32, step=10))
        assert self.whole(batches).ending == (4, 0)

    def test_nothing_of_a_device_without_a_queue(self):
        batches = LaunchedBatches(lambda output: output.is_done, HostDevice().begun_layers)
        batches.add(self.launched(4, 32))
        assert self.whole(batches).ending is None and self.whole(batches).begun_layers == 0


DECODE_S, LAYER_S = 0.010, 0.004
CHAT, DOCUMENT = Plan(own_tokens=9, max_tokens=60), Plan(own_tokens=60, max_tokens=8, step=6)


def schedule(**changes):
    times = {"decode_ms": (DECODE_S * 1e3,), "layer_ms": (LAYER_S * 1e3,), "host_ms": 0.2, "is_read_early": True}
    return Schedule(**({"plans": (CHAT, DOCUMENT), "use_v2": True, "look_ahead": 1, **times} | changes))


class Noted(Run):
    """When each token has come, and the steps that left out decode."""

    def __init__(self, *args):
        super().__init__(*args)
        self.came_s: dict[str, list[float]] = {}
        self.waits = 0
        scheduled = self.scheduler.schedule

        def noted(*arguments):
            output = scheduled(*arguments)
            if order_of(output).leaves_out_decode:
                assert not output.num_scheduled_tokens
                self.waits += 1
            return output

        self.scheduler.schedule = noted

    def _keep(self, outputs):
        super()._keep(outputs)
        for client in outputs.values():
            for output in client.outputs:
                self.came_s.setdefault(output.request_id, []).extend([self.gpu.now_s] * len(output.new_token_ids))

    def second_gap_s(self, name="r1"):
        first, second = self.came_s[name][:2]
        return second - first


def run(lab, schedule, waits=True):
    with lab.lend(schedule) as (gpu, scheduler, worker):
        if not waits:
            scheduler._end_in_sight = None
        noted = Noted(lab, schedule, gpu, scheduler, worker)
        noted.run()
        noted.check_answers()
        noted.check_nothing_left()
        return noted


def test_the_second_token_comes_a_step_after_the_first(lab):
    """As long as the lane is left out it comes two steps later."""
    waiting, ahead = run(lab, schedule()), run(lab, schedule(), waits=False)
    assert waiting.waits and not ahead.waits
    assert 0.99 * DECODE_S <= waiting.second_gap_s() < 1.2 * DECODE_S
    assert 1.99 * DECODE_S <= ahead.second_gap_s() < 2.2 * DECODE_S
    assert waiting.came_s["r1"][0] <= ahead.came_s["r1"][0] + 0.2 * DECODE_S, "the first one is not later for it"


def test_all_that_decode_wait_once_for_the_host(lab):
    waiting, ahead = run(lab, schedule()), run(lab, schedule(), waits=False)
    gaps = [later - earlier for earlier, later in zip(waiting.came_s["r0"], waiting.came_s["r0"][1:], strict=False)]
    assert max(gaps) < 1.2 * DECODE_S
    assert waiting.came_s["r0"][-1] < ahead.came_s["r0"][-1] + DECODE_S


def test_never_for_two_steps_in_succession(lab):
    """Layers that never begin in time: each guess is wrong."""
    with lab.lend(schedule()) as (gpu, scheduler, worker):
        scheduler._end_in_sight = SimpleNamespace(reported=lambda *_: None, is_near=lambda batch_id: True)
        noted = Noted(lab, schedule(), gpu, scheduler, worker)
        outputs = []
        scheduled = scheduler.schedule

        def kept(*arguments):
            outputs.append(scheduled(*arguments))
            return outputs[-1]

        scheduler.schedule = kept
        noted.run()
        noted.check_answers()
    left_out = [order_of(output).leaves_out_decode for output in outputs]
    assert sum(left_out) > 2 and not any(a and b for a, b in zip(left_out, left_out[1:], strict=False))


@pytest.mark.parametrize(
    "changes",
    [
        {"plans": (CHAT, Plan(own_tokens=60, max_tokens=1, step=6))},
        {"use_v2": False},
        {"look_ahead": 0},
        {"has_gpu": False},
    ],
    ids=["nothing would decode", "Model Runner V1", "synchronous scheduling", "a CPU"],
)
def test_not_where_it_would_be_of_no_use(lab, changes):
    assert not run(lab, schedule(**changes)).waits


def test_a_prompt_in_two_batches_is_waited_for_at_the_end_of_the_second(lab):
    changes = {"plans": (CHAT, Plan(own_tokens=90, max_tokens=8, step=6)), "settings": {"max_prefill_tokens": 48}}
    waiting = run(lab, schedule(**changes))
    assert waiting.waits == 1 and waiting.second_gap_s() < 1.2 * DECODE_S


def test_the_policy_is_told_of_all_layers_and_of_the_whole_time(lab):
    def told(waits):
        steps = []
        with lab.lend(schedule()) as (gpu, scheduler, worker):
            if not waits:
                scheduler._end_in_sight = None
            scheduler._observer = SimpleNamespace(
                scheduled=lambda *_: None, done=lambda output, took, work, is_saturated: steps.append((took.ms, work))
            )
            noted = Noted(lab, schedule(), gpu, scheduler, worker)
            noted.run()
        assert bool(noted.waits) == waits
        return steps

    waiting, ahead = told(True), told(False)
    assert sum(work for _, work in waiting) == pytest.approx(sum(work for _, work in ahead))
    assert sum(ms for ms, _ in waiting) == pytest.approx(sum(ms for ms, _ in ahead), abs=DECODE_S * 1e3)
    assert max(ms for ms, work in waiting if work) < 1.2 * DECODE_S * 1e3
