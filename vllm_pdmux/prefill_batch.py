# SPDX-License-Identifier: Apache-2.0
"""The scheduler's record of the prefill batch that is in the lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass
class PrefillBatch:
    """The chunks of one or more requests that go through the layers together."""

    id: int
    output: SchedulerOutput  # the step that the lane runs
    requests: dict[str, Request]
    grammar: GrammarOutput | None
    work: float  # see policy.PromptWork
    stored_events: list[KVCacheEvent]  # published when it has ended
    new_blocks: set[int]  # ids of those that it writes to: not announced as stored before it has ended
    layers_launched: int = 0  # as far as reports have come
    held_blocks: list[list[KVCacheBlock]] = field(default_factory=list)  # of requests that ended meanwhile

    @property
    def num_tokens(self) -> int:
        tokens: int = self.output.total_num_scheduled_tokens
        return tokens

    def alive(self, requests: Mapping[str, Request]) -> list[Request]:
        """Those of the batch's requests that the scheduler still knows.

        By identity: a request that was aborted and one sent later with its id are two.
        """
        return [request for req_id, request in self.requests.items() if requests.get(req_id) is request]

    def num_joined(self, requests: Mapping[str, Request]) -> int:
        """How many of its requests decode from now on, when it has ended."""
        alive = self.alive(requests)
        return sum(one.status == RequestStatus.RUNNING and not one.is_prefill_chunk for one in alive)

    def stale_ids(self, requests: Mapping[str, Request]) -> set[str]:
        """The ids that have been given to another request since."""
        return {req_id for req_id, request in self.requests.items() if requests.get(req_id) not in (None, request)}

    def output_for(self, requests: Mapping[str, Request]) -> SchedulerOutput:
        """The batch's step, without requests whose id has been given to another request since."""
        stale = self.stale_ids(requests)
        if not stale:
            return self.output
        kept = {i: n for i, n in self.output.num_scheduled_tokens.items() if i not in stale}
        return replace(self.output, num_scheduled_tokens=kept)


def own_grammar(grammar: GrammarOutput | None) -> GrammarOutput | None:
    """A copy that lasts: vLLM's bitmask is a view of a buffer that the next step fills again."""
    return None if grammar is None else replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())
