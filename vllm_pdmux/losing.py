# SPDX-License-Identifier: Apache-2.0
"""What becomes of a prefill lane that stands still: its requests end with an error, and decode goes on without it.

What has been launched cannot be taken back from a device that does not answer. So the KV blocks of lost batches are
kept until the worker says that nothing runs of them any more, and until then prompts are served by stock vLLM's steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_pdmux.entering import PREFILL
from vllm_pdmux.leaving import Leaving
from vllm_pdmux.messages import LaneReport
from vllm_pdmux.metrics.definitions import FAILED
from vllm_pdmux.outputs import outputs_of_ended
from vllm_pdmux.prefill_batch import PrefillBatch
from vllm_pdmux.residency import Residency

logger = init_logger("vllm.pdmux.scheduler")


class Losing(Leaving):
    """A mixin over one of vLLM's schedulers."""

    _batches: deque[PrefillBatch]  # in the lane, in order
    _bound_prompts: Callable[[], Iterator[Request]]  # of Entering
    _residency: Residency | None  # where there is a V2 runner
    _lose: int | None  # the last batch that the worker has still to be told of
    _next_batch_id: int

    def _heard_of_lane(self, report: LaneReport) -> dict[int, EngineCoreOutputs]:
        """What the worker says of a lane that it has given up, or that is back."""
        if report.back is not None and self._lost:
            for batch in self._lost:
                if batch.id <= report.back:
                    self._free_held(batch)
            self._lost = [batch for batch in self._lost if batch.id > report.back]
            if not self._lost:
                logger.info("PD-multiplexing: the prefill lane is back")
        return self._lose_lane(report.stalled_s) if report.stalled_s else {}

    def _lose_lane(self, stalled_s: float) -> dict[int, EngineCoreOutputs]:
        self._lose = self._next_batch_id - 1
        if not self._batches:
            return {}  # they have left it meanwhile
        doomed: dict[str, Request] = {}
        for batch in self._batches:
            alive = self._taken_back(batch)
            # One that has been preempted starts again, in a stock step.
            doomed |= {one.request_id: one for one in alive if one.status == RequestStatus.RUNNING}
        if self._counters is not None:
            self._counters.batches_left(FAILED, len(self._batches))
        if self._residency is not None:
            for bound in self._bound_prompts():
                if self._residency.lane_of(bound.request_id) == PREFILL:  # it cannot go on in the other one
                    doomed[bound.request_id] = bound
        self._lost += self._batches  # which then keep the blocks
        self._batches.clear()
        self.finish_requests(list(doomed), RequestStatus.FINISHED_ERROR)
        logger.error(
            "PD-multiplexing: the prefill lane is given up after %.0f s without progress; prompts are served by stock "
            "steps until it is back; ended with an error: %s",
            stalled_s,
            ", ".join(doomed) or "no request",
        )
        return outputs_of_ended(doomed.values())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Raises RuntimeError for running requests while blocks are kept, as stock vLLM does while others have some."""
        if reset_running_requests and self._lost:
            raise RuntimeError(
                "the prefix cache cannot be reset while the prefill lane is given up, since its KV blocks are kept: "
                "reset it when the log says that the lane is back, or start the engine again"
            )
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def has_requests(self) -> bool:
        """Also until the worker has said that nothing runs of them: it says so in a step, and a paused engine would
        otherwise get other weights meanwhile."""
        return super().has_requests() or self._lose is not None or bool(self._lost)
