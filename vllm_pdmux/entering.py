# SPDX-License-Identifier: Apache-2.0
"""How a batch enters the prefill lane: when there is room for one, and the view in which stock vLLM admits it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_pdmux.admission import Admission
from vllm_pdmux.hiding import Hiding
from vllm_pdmux.kv_events import blocks_to_compute, stored_set_aside
from vllm_pdmux.loads import Loads
from vllm_pdmux.prefill_batch import PrefillBatch, own_grammar
from vllm_pdmux.residency import Residency

DECODE, PREFILL = "decode", "prefill"  # the lanes


class Entering(Hiding, Loads):
    """A mixin over one of vLLM's schedulers."""

    _admission: Admission
    _batches: deque[PrefillBatch]  # in the lane, in order
    _next_batch_id: int
    _overtaken: bool  # whether the last batch has left out a prompt that is half done
    # prev_step_scheduled_req_ids of the prefill view: the requests in its runner's persistent batch. A request that
    # comes to a runner is sent with all its tokens, one that is in its batch without.
    _prefill_prev_step: set[str]
    _residency: Residency | None  # where there is a V2 runner

    def _anything_to_prefill(self) -> bool:
        waiting = len(self.waiting) + len(self.kv_holding_waiting) - self.num_waiting_for_streaming_input
        return waiting > 0 or any(request.is_prefill_chunk for request in self.running)

    def _lane_has_room(self) -> bool:
        """Whether to admit a batch now."""
        if not self._batches:
            return True
        if len(self._batches) >= self._admission.max_batches or not self._anything_to_prefill():
            return False
        if any(batch.stale_ids(self.requests) for batch in self._batches):
            return False  # the worker still holds another request under an id that has been sent again
        if not self._admission.is_time(self._batches[-1].layers_launched):
            return False
        # Fused steps need an empty lane: where they are better it gets no more batches.
        return not (self._may_fuse() and self._tokens_of_fused_step())

    def _may_fuse(self) -> bool:
        """A prompt with prompt logprobs must end in the V2 runner where it began, and the lane is where it should."""
        if not self._pdmux_policy.fuses or self._residency is None:
            return self._pdmux_policy.fuses
        return self._bound_lane() is None and not self._wants_prompt_logprobs()

    def _bound_lane(self) -> str | None:
        """The lane in which an unfinished prompt must be continued."""
        assert self._residency is not None  # there is a V2 runner
        bound = next(self._bound_prompts(), None)
        return None if bound is None else self._residency.lane_of(bound.request_id)

    def _bound_prompts(self) -> Iterator[Request]:
        """Unfinished prompts that cannot change lanes: prompt logprobs are gathered in one V2 runner."""
        for request in self.running:
            params = request.sampling_params
            if request.is_prefill_chunk and params is not None and params.prompt_logprobs is not None:
                yield request

    def _begin_batch(self) -> tuple[PrefillBatch | None, set[str]]:
        """Let the prefill view admit a batch; the ids of requests that it preempted."""
        batch, pool = None, self.kv_cache_manager.block_pool
        begun = self._half_done()
        self._overtaken = not self._overtaken and self._is_overtaken(begun)
        prefilling = begun[1:] if self._overtaken else begun
        others = [request for request in self.running if request not in prefilling]
        max_active, prev_step = self.max_num_active_reqs, self.prev_step_scheduled_req_ids
        # The hidden requests keep their seats.
        self.max_num_active_reqs = max(0, max_active - len(others))
        self.prev_step_scheduled_req_ids = self._prefill_prev_step
        try:
            most_tokens, visible = self._admission.most_tokens, self._visible(prefilling, hidden_before=others)
            with (
                self._only_fitting_adapters(),
                visible,
                self._limited_to(most_tokens),
                stored_set_aside(pool) as stored,
            ):
                output = super().schedule()
        finally:
            self.max_num_active_reqs, self.prev_step_scheduled_req_ids = max_active, prev_step
        if output.total_num_scheduled_tokens > 0:
            grammar = own_grammar(self.get_grammar_bitmask(output))
            requests = {req_id: self.requests[req_id] for req_id in output.num_scheduled_tokens}
            new_blocks = blocks_to_compute(output, requests, self.kv_cache_manager)
            output = self._localise(output, PREFILL)
            work = self._work_of(output)
            batch = PrefillBatch(self._next_batch_id, output, requests, grammar, work, stored, new_blocks)
            self._batches.append(batch)
            self._next_batch_id += 1
        else:
            pool.kv_event_queue.extend(stored)  # of blocks that a request has hit which found no room
        return batch, output.preempted_req_ids or set()

    def _localise(self, output: SchedulerOutput, lane: str) -> SchedulerOutput:
        left = self._prefill_prev_step if lane == DECODE else self.prev_step_scheduled_req_ids
        left.difference_update(output.num_scheduled_tokens)  # they are no longer in the other runner's batch
        if self._residency is None:
            return output
        return self._residency.localise(output, lane, self.requests, self.kv_cache_manager.get_block_ids)
