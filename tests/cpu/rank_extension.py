# SPDX-License-Identifier: Apache-2.0
"""What tests ask of a worker process of an engine with several ranks (vLLM's ``--worker-extension-cls``)."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from driver import LANE_THREAD
from vllm.distributed.parallel_state import get_tp_group

COLLECTIVES = ("all_reduce", "all_gather", "gather")


class Collective(NamedTuple):
    """One that a rank took part in."""

    lane: bool  # whether the prefill lane ran it, by the thread
    own: bool  # whether it went through the communicator that is the lane's own
    name: str
    shape: tuple[int, ...]  # of its input


class RankExtension:
    """Mixed into the worker by vLLM. Its methods are called on every rank."""

    rank: int
    model_runner: Any
    _prefill_lane: Any
    _communicators: Any

    def watch_collectives(self) -> None:
        """Record every collective of the tensor-parallel group from now on. Between steps, once."""
        self._seen: list[Collective] = []
        self._watch(get_tp_group().device_communicator, own=False)
        for group, own in self._communicators._pairs:
            if group is get_tp_group():
                self._watch(own.device_communicator, own=True)

    def _watch(self, communicator: Any, own: bool) -> None:
        for name in COLLECTIVES:
            self._record_calls(communicator, name, own)

    def _record_calls(self, communicator: Any, name: str, own: bool) -> None:
        stock = getattr(communicator, name)

        def collective(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            in_lane = threading.current_thread().name == LANE_THREAD
            self._seen.append(Collective(in_lane, own, name, tuple(tensor.shape)))
            return stock(tensor, *args, **kwargs)

        setattr(communicator, name, collective)

    def collectives(self) -> list[Collective]:
        """Those since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def slow_down(self, rank: int | None, seconds: float) -> None:
        """Let one rank lose so much time in the middle of each forward pass, in both lanes; None: none."""
        self._lost_s = seconds if rank == self.rank else 0.0
        if not hasattr(self, "_hook"):
            layers = self.model_runner.get_model().model.layers
            self._hook = layers[len(layers) // 2].register_forward_pre_hook(lambda *_: time.sleep(self._lost_s))

    def fail_once(self, rank: int) -> None:
        """Let the next prefill in the lane raise on one rank."""
        stock = self._prefill_lane._runner.execute_model

        def execute_model(output: Any) -> Any:
            self._prefill_lane._runner.execute_model = stock
            raise ValueError("this rank has failed")

        if rank == self.rank:
            self._prefill_lane._runner.execute_model = execute_model

    def leftovers(self) -> list[str]:
        """What is left of requests and batches."""
        lane = self._prefill_lane
        kept = {
            "requests of decode": self.model_runner.requests,
            "requests of prefill": lane._runner.requests,
            "queue": lane._queue,
            "current": lane._current,
            "launched": list(lane._launched.ids()),
            "in the lane": lane._in_lane,
            "finished": lane._finished_req_ids,
            "threads": [thread for thread in threading.enumerate() if thread.name == LANE_THREAD],
        }
        return [f"rank {self.rank} keeps {what}: {value}" for what, value in kept.items() if value]

    def threads(self) -> int:
        """How many threads the process has."""
        return threading.active_count()
