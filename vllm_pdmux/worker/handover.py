# SPDX-License-Identifier: Apache-2.0
"""A request changes lanes: its state leaves one runner and enters the other; the KV blocks stay where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Handover(Protocol):
    """How requests move between two runners of one kind."""

    def move(self, req_ids: Iterable[str], source: Any, target: Any) -> None:
        """Let `target` take over those of `req_ids` that `source` knows. Others are new to both."""

    def forget(self, req_ids: Iterable[str], runner: Any) -> None:
        """Remove what `runner` holds of requests. Its batch must not be in progress."""

    def gone(self, output: SchedulerOutput) -> set[str]:
        """The requests that both runners must forget with the step `output`."""


class HandoverV1:
    """The state object itself moves, not a copy made from the scheduler's data.

    It holds the tokens sampled so far, the position of a seeded generator and half-finished prompt logprobs, and stock
    vLLM carries all of these on.
    """

    def move(self, req_ids: Iterable[str], source: Any, target: Any) -> None:
        for req_id in req_ids:
            state = source.requests.pop(req_id, None)
            if state is None:
                continue
            assert req_id not in target.requests, f"request {req_id} is known to both lanes"
            target.requests[req_id] = state
            # A row that stays behind would be taken for the request's current state should it come back.
            source.input_batch.remove_request(req_id)
            num_prompt_logprobs = source.num_prompt_logprobs.pop(req_id, None)
            if num_prompt_logprobs is not None:
                target.num_prompt_logprobs[req_id] = num_prompt_logprobs

    def forget(self, req_ids: Iterable[str], runner: Any) -> None:
        for req_id in req_ids:
            if runner.requests.pop(req_id, None) is not None:
                runner.input_batch.remove_request(req_id)
                runner.num_prompt_logprobs.pop(req_id, None)

    def gone(self, output: SchedulerOutput) -> set[str]:
        finished: set[str] = output.finished_req_ids  # a preempted request resumes from the state that its runner has
        return finished


class HandoverV2:
    """The target is given the request as a new one with all its tokens (see `residency`); the source only forgets it.

    Nothing else needs to move: Model Runner V2 samples by seed and position, and a request with prompt logprobs ends
    its prefill in the lane where it began.
    """

    def move(self, req_ids: Iterable[str], source: Any, target: Any) -> None:
        self.forget(req_ids, source)

    def forget(self, req_ids: Iterable[str], runner: Any) -> None:
        for req_id in req_ids:
            if req_id in runner.req_states.req_id_to_index:
                runner._remove_request(req_id)

    def gone(self, output: SchedulerOutput) -> set[str]:
        gone: set[str] = output.finished_req_ids | (output.preempted_req_ids or set())
        return gone


def handover_for(vllm_config: Any) -> Handover:
    """The handover for the model runner that the engine uses."""
    return HandoverV2() if vllm_config.use_v2_model_runner else HandoverV1()
