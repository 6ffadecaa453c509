# SPDX-License-Identifier: Apache-2.0
"""A prefill lane that stands still on a virtual GPU (model_check.py), and the watchdog's action `fail`."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from model_check import STUCK_S, Checked, Plan, Schedule, check

from vllm_pdmux import losing
from vllm_pdmux.metrics.definitions import BATCHES, DROPPED, FAILED, key_of

CHAT = Plan(own_tokens=10, max_tokens=120)
STUCK = Schedule(
    plans=(CHAT, Plan(own_tokens=30, max_tokens=5, step=4)),
    use_v2=True,
    look_ahead=1,
    settings={"layers_per_group": 1},
    kv_blocks=64,
)


@pytest.mark.parametrize("use_v2, look_ahead", [(False, 0), (True, 0), (True, 1), (True, 2)])
def test_what_is_in_it_fails_and_what_comes_later_is_served(lab, use_v2, look_ahead):
    stuck, meanwhile, later = (Plan(own_tokens=30 + i, max_tokens=5, step=step) for i, step in enumerate((4, 12, 90)))
    schedule = Schedule(
        plans=(CHAT, stuck, meanwhile, later),
        use_v2=use_v2,
        look_ahead=look_ahead,
        settings={"layers_per_group": 1},
        kv_blocks=64,
        events={5: "give_up"},
    )
    counts = check(lab, schedule)
    assert counts["losses"] == 1 and counts["errors"] == 1 and counts["drops"] == 0
    assert counts["batches ended"] >= 1, "the lane is used again"


def test_all_prompts_whose_logprobs_are_gathered_in_it_end(lab):
    """One of the two has been left out of the last batch, and has no layer in the lane."""
    prompts = (
        Plan(own_tokens=n, max_tokens=4, step=step, wants_prompt_logprobs=True) for n, step in [(200, 4), (60, 6)]
    )
    schedule = Schedule(
        plans=(Plan(own_tokens=10, max_tokens=60), *prompts),
        use_v2=True,
        settings={"layers_per_group": 2, "max_prefill_tokens": 20},
        fused=(8, 10**9),
        kv_blocks=64,
    )
    with lab.lend(schedule) as parts:
        run = Checked(lab, schedule, *parts)
        while [list(batch.requests) for batch in run.scheduler._batches] != [["r2"]]:
            run.one_step()
        assert [one.request_id for one in run.scheduler.running if one.is_prefill_chunk] == ["r1", "r2"]
        run._give_up()
        run.run()
        run.check_answers()
        run.check_nothing_left()
    assert run.counts["losses"] == 1 and run.counts["errors"] == 2


@contextmanager
def stuck(lab, schedule=STUCK, where=2):
    """A run whose prefill lane has launched `where` layers, and its stream, on which nothing ends for a while."""
    with lab.lend(schedule) as parts:
        run = Checked(lab, schedule, *parts)
        while run.lane._current is None or run.lane._lane.layer < where:
            run.one_step()
        stream = run.lane._device._stream
        assert stream is not run.gpu.decode
        stream.run(STUCK_S)
        run.lane._queued = run.lane._device.end()
        yield run, stream
        run.run()
        run.check_answers()
        run.check_nothing_left()


def give_up(run):
    run.lane.give_up(run.lane.progress(), 1.0)
    while run.lane._lost is None:
        run.one_step()


def test_blocks_are_kept_until_the_layers_have_run_though_nobody_is_left(lab):
    """A server that idles looks on, so that its prefix cache can be emptied, and it can be paused."""
    with stuck(lab) as (run, stream):
        give_up(run)
        run.core.abort_requests(["r0"])
        run.aborted.add(("r0", False))
        for _ in range(3):
            run.one_step()
        assert not run.scheduler.requests
        assert run.gpu.now_s < stream.end_s
        assert run.scheduler._lost and run.scheduler.has_requests() and not run.scheduler.reset_prefix_cache()
        run.gpu.now_s = stream.end_s
        for _ in range(3):
            run.one_step()
        assert not run.scheduler.has_requests() and run.scheduler.reset_prefix_cache()


def test_what_is_said_and_counted(lab, monkeypatch):
    said = []
    with stuck(lab) as (run, stream):
        for level in ("error", "info"):
            monkeypatch.setattr(losing.logger, level, lambda text, *values: said.append(text % values))
        give_up(run)
        assert said == [
            "PD-multiplexing: the prefill lane is given up after 1 s without progress; prompts are served by stock "
            "steps until it is back; ended with an error: r1"
        ]
        with pytest.raises(RuntimeError) as raised:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert str(raised.value) == (
            "the prefix cache cannot be reset while the prefill lane is given up, since its KV blocks are kept: "
            "reset it when the log says that the lane is back, or start the engine again"
        )
        run.gpu.now_s = stream.end_s
        run.run()
        assert said[1:] == ["PD-multiplexing: the prefill lane is back"]
        counted = run.scheduler._counters.values
        assert counted[key_of(BATCHES, FAILED)] == 1 and counted[key_of(BATCHES, DROPPED)] == 0


def test_a_lane_that_waited_for_the_engine_alone_is_not_given_up(lab):
    with stuck(lab) as (run, stream):
        run.gpu.now_s = stream.end_s  # while the engine's thread was somewhere else
        run.lane.give_up(run.lane.progress(), 1.0)
        run.run()
        assert run.counts["losses"] == run.counts["errors"] == 0 and run.counts["batches ended"] == 1


def test_a_lane_that_has_come_on_meanwhile_is_not_given_up(lab):
    with stuck(lab) as (run, _):
        progress = run.lane.progress()
        run.one_step()
        run.lane.give_up(progress, 1.0)
        run.run()
        assert run.counts["losses"] == run.counts["errors"] == 0


def test_decode_that_comes_on_beside_what_was_given_up_is_progress(lab):
    with stuck(lab) as (run, stream):
        give_up(run)
        seen = []
        for _ in range(5):
            seen.append(run.lane.progress())
            run.one_step()
        assert run.gpu.now_s < stream.end_s and None not in seen and len(set(seen)) == len(seen)


def test_decode_that_waits_for_what_was_given_up_makes_no_progress(lab):
    """Else the watchdog would not end the process, and clients would wait for ever."""
    with stuck(lab) as (run, stream):
        give_up(run)
        run.gpu.decode.wait_event(run.lane._lost[1])
        run.one_step()
        progress = run.lane.progress()
        run.gpu.now_s = stream.end_s - 1e-6
        assert progress is not None and run.lane.progress() == progress
        assert "which were given up" in run.lane.describe()
        run.gpu.now_s = run.gpu.decode.end_s
        assert run.lane.progress() is None


def test_an_engine_that_does_not_return_from_a_step_makes_no_progress_while_something_is_given_up(lab):
    with stuck(lab) as (run, _):
        give_up(run)
        seen, execute = [], run.worker.model_runner.execute_model

        def looked_at(output):
            seen.extend([run.lane.progress(), run.lane.progress()])
            return execute(output)

        run.worker.model_runner.execute_model = looked_at
        run.gpu.now_s = run.gpu.decode.end_s  # so that there is no decode step to wait for
        run.one_step()
        assert seen[0] is not None and seen[0] == seen[1]


@pytest.mark.parametrize("look_ahead", [1, 2])
def test_steps_that_were_scheduled_before_it_was_known_launch_nothing(lab, look_ahead):
    with stuck(lab, Schedule(**{**vars(STUCK), "look_ahead": look_ahead})) as (run, _):
        launch, launched = run.lane._launch, []
        run.lane._launch = lambda *arguments, **options: launched.append(run.step) or launch(*arguments, **options)
        give_up(run)
        assert launched == []
        run.lane._launch = launch


def test_decode_that_waits_for_a_batch_that_raised_is_watched(lab):
    """A layer is stuck, and one behind it cannot be launched: it is dropped, and decode ordered behind the first."""
    with stuck(lab, Schedule(**{**vars(STUCK), "faults": {0: 2}})) as (run, stream):
        while run.lane._current is not None:
            run.one_step()
        run.gpu.now_s = stream.end_s - 1e-6
        progress = run.lane.progress()
        assert progress is not None and "decode waits" in run.lane.describe()
        run.gpu.now_s = stream.end_s
        assert run.lane.progress() != progress
