# SPDX-License-Identifier: Apache-2.0
"""Which runner knows which request, for Model Runner V2.

The stock scheduler knows of one runner and sends only what has changed of a request that it has sent before. A request
that changes lanes is sent as a new one, with all its tokens and blocks; with one token left to compute it runs as a
decode there, graphs included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request


class Residency:
    """The lane in which each request was sent last."""

    def __init__(self) -> None:
        self._lane: dict[str, str] = {}

    def lane_of(self, req_id: str) -> str | None:
        return self._lane.get(req_id)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests that have ended, or were preempted between two steps.

        Before anything is scheduled: an id may be sent in this step.
        """
        for req_id in req_ids:
            self._lane.pop(req_id, None)

    def localise(
        self,
        output: SchedulerOutput,
        lane: str,
        requests: Mapping[str, Request],
        block_ids: Callable[[str], tuple[list[int], ...]],
    ) -> SchedulerOutput:
        """`output` as the runner of `lane` needs it: requests that it does not know become new ones."""
        cached = output.scheduled_cached_reqs
        moved = {i for i, req_id in enumerate(cached.req_ids) if self._lane.get(req_id) != lane}
        if moved:
            new = [
                replace(
                    NewRequestData.from_request(
                        requests[cached.req_ids[i]],
                        block_ids(cached.req_ids[i]),
                        requests[cached.req_ids[i]]._all_token_ids,
                    ),
                    num_computed_tokens=cached.num_computed_tokens[i],
                )
                for i in sorted(moved)
            ]
            output = replace(
                output,
                scheduled_new_reqs=[*output.scheduled_new_reqs, *new],
                scheduled_cached_reqs=_without(cached, moved),
            )
        self._lane.update(dict.fromkeys(output.num_scheduled_tokens, lane))
        return output


def _without(cached: CachedRequestData, rows: set[int]) -> CachedRequestData:
    def kept(values: list[Any]) -> list[Any]:
        return [value for i, value in enumerate(values) if i not in rows]

    return CachedRequestData(
        req_ids=kept(cached.req_ids),
        resumed_req_ids=cached.resumed_req_ids,
        new_token_ids=kept(cached.new_token_ids),
        all_token_ids=cached.all_token_ids,
        new_block_ids=kept(cached.new_block_ids),
        num_computed_tokens=kept(cached.num_computed_tokens),
        num_output_tokens=kept(cached.num_output_tokens),
    )
