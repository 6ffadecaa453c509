# SPDX-License-Identifier: Apache-2.0
"""What must hold in every step of an engine with the plugin, whatever the schedule."""

import threading

from driver import LANE_THREAD

from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import PromptWork

# A schedule's stock steps between those of the lanes: prompt tokens, and every how many times.
FUSED = [None, None, (16, 2), (40, 3), (200, 2)]


class Fusing:
    """A policy that fuses every so often, and else does what another one decides."""

    observes = fuses = True

    def __init__(self, policy, tokens, every):
        self._policy, self._tokens, self._every = policy, tokens, every
        self._asked = 0

    def decide(self, load):
        return self._policy.decide(load)

    def fused_tokens(self, load):
        self._asked += 1
        return 0 if self._asked % self._every else self._tokens

    def overtakes(self, waiting, begun):
        assert waiting.work > 0 and begun.work > 0
        return waiting.work < begun.work

    def observe(self, step):
        assert step.step_ms >= 0 and step.prefill_work >= 0


def fuse_now_and_then(scheduler, fused):
    """Let the scheduler take stock steps of `fused` = (prompt tokens, every how many times) in between; None: never."""
    scheduler._observer = None
    if fused is not None:
        scheduler._pdmux_policy = Fusing(scheduler._pdmux_policy, *fused)
        scheduler._observer = Observer(scheduler._pdmux_policy, PromptWork(1000))


class Watch:
    """Records what the scheduler schedules and checks it; subclasses check what the lane has done after each step."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.output = None  # of the step that was scheduled last

    def __enter__(self):
        original = self.scheduler.schedule

        def schedule(*args):
            self.output = original(*args)
            for batch in self.scheduler._batches:
                self.check_batch(batch)
            return self.output

        self.scheduler.schedule = schedule
        return self

    def __exit__(self, *exc_info):
        del self.scheduler.schedule

    def check_batch(self, batch):
        assert not batch.requests.keys() & self.output.num_scheduled_tokens.keys(), "a request is in both lanes"
        manager = self.scheduler.kv_cache_manager
        in_use = [block for blocks in batch.held_blocks for block in blocks]
        for request in batch.alive(self.scheduler.requests):
            in_use += [block for group in manager.get_blocks(request.request_id).blocks for block in group]
        assert all(block.ref_cnt > 0 for block in in_use), "a block is free while layers are to write it"

    def check_step(self):
        """Called after each step; a paused engine makes none."""
        assert sum(thread.name == LANE_THREAD for thread in threading.enumerate()) <= 1
        if self.output is not None:
            output, self.output = self.output, None
            self.check_lanes(output)

    def check_lanes(self, output):
        """Called with the step `output` when it has been updated."""
        raise AssertionError("a subclass says what the lanes must have done")
