# SPDX-License-Identifier: Apache-2.0
"""What the policy is asked and told: from vLLM's requests and steps to loads, prompts and their work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from vllm_pdmux.beneath import SchedulerBeneath
from vllm_pdmux.messages import LaneReport
from vllm_pdmux.observer import Observer
from vllm_pdmux.policy import MOST_WAITING, Load, Policy, Prompt, PromptWork
from vllm_pdmux.prefill_batch import PrefillBatch


class Loads(SchedulerBeneath):
    """A mixin over one of vLLM's schedulers; it reads and changes nothing."""

    _pdmux_policy: Policy
    _prompt_work: PromptWork
    _model_layers: int
    _batches: deque[PrefillBatch]  # in the lane, in order
    _observer: Observer | None  # None: the policy does not learn
    _batch: Callable[[int], PrefillBatch | None]  # of Leaving

    def _tokens_of_fused_step(self) -> int:
        """Of a step in which stock vLLM prefills and decodes in one batch; 0: the lanes do it."""
        in_lane = {req_id for batch in self._batches for req_id in batch.requests}
        decoding = [one for one in self.running if not one.is_prefill_chunk and one.request_id not in in_lane]
        begun = self._half_done()
        waiting_work, first_tokens = self._waiting_work(begun)
        load = Load(
            len(decoding),
            self.max_num_scheduled_tokens,
            self._model_layers,
            sum(request.num_computed_tokens for request in decoding),
            computed_tokens=begun[0].num_computed_tokens if begun else 0,
            oldest_wait_ms=self._oldest_wait_ms([]),
            waiting_work=waiting_work,
            first_tokens=first_tokens,
            is_lane_busy=bool(self._batches),
        )
        tokens = self._pdmux_policy.fused_tokens(load)
        return tokens and len(decoding) + tokens

    def _load_beside(self, output: SchedulerOutput, batch: PrefillBatch) -> Load:
        """Of a step with `batch` in the lane and the decode step `output`.

        Where nothing decodes, those count who will next: what prefill is to leave them is decided before they do.
        """
        decoding = list(output.num_scheduled_tokens)
        decoding = decoding or [request.request_id for request in self._batches[0].alive(self.requests)]
        context_tokens, oldest_wait_ms, waiting_work = 0, 0.0, 0.0
        first_tokens: tuple[tuple[float, float], ...] = ()
        if self._observer is not None:
            context_tokens = sum(self.requests[req_id].num_computed_tokens for req_id in decoding)
            in_lane = [request for one in self._batches for request in one.alive(self.requests)]
            oldest_wait_ms = self._oldest_wait_ms(in_lane)
            waiting_work, first_tokens = self._waiting_work(self._half_done())
        return Load(
            len(decoding),
            batch.num_tokens,
            self._model_layers,
            context_tokens,
            batch.work,
            oldest_wait_ms=oldest_wait_ms,
            waiting_work=waiting_work,
            first_tokens=first_tokens,
            is_lane_busy=True,
        )

    def _half_done(self) -> list[Request]:
        """The prompts of which a part is prefilled, or on its way through the lane."""
        return [request for request in self.running if request.is_prefill_chunk]

    def _wants_prompt_logprobs(self) -> bool:
        """Whether one of the first prompts that wait does."""
        params = (request.sampling_params for request in islice(self.waiting, MOST_WAITING))
        return any(one is not None and one.prompt_logprobs is not None for one in params)

    def _lane_work(self) -> float:
        """That is left of the batches in the lane, as far as reports have come."""
        return sum(one.work * (1 - one.layers_launched / self._model_layers) for one in self._batches)

    def _waiting_work(self, begun: list[Request]) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Of the prompts that wait or are half done, of the first ones where many wait; and `Load.first_tokens`.

        Those that wait count whole: what the prefix cache has of them is not known before they are scheduled."""
        now_s, before = time.time(), self._lane_work()
        # Two chunks of one request may be in the lane.
        in_lane = {one.request_id: one for batch in self._batches for one in batch.alive(self.requests)}
        ends_in_lane = [one for one in in_lane.values() if not (one.is_prefill_chunk or one.num_output_tokens)]
        first_tokens = [(before, max(0.0, (now_s - request.arrival_time) * 1e3)) for request in ends_in_lane]
        work = 0.0
        for one in (*begun, *islice(self.waiting, MOST_WAITING)):
            work += self._prompt_work.of(one.num_tokens - one.num_computed_tokens, one.num_computed_tokens)
            if not one.num_output_tokens:
                first_tokens.append((before + work, max(0.0, (now_s - one.arrival_time) * 1e3)))
        return work, tuple(first_tokens)

    def _oldest_wait_ms(self, admitted: list[Request]) -> float:
        """Of the request that has waited for its first token longest: of those in prefill, or the first that waits."""
        # Preempted requests, which have had their first token, are at the head of the queue.
        waiting = next((request for request in self.waiting if not request.num_output_tokens), None)
        # Of what is half done a part may have been overtaken, and so not be admitted.
        since_s = [request.arrival_time for request in admitted + self._half_done() if not request.num_output_tokens]
        since_s += [waiting.arrival_time] if waiting is not None else []
        return max(0.0, (time.time() - min(since_s)) * 1e3) if since_s else 0.0

    def _is_overtaken(self, begun: list[Request]) -> bool:
        """Whether a batch leaves out the first prompt that is half done, for another one or the first that waits."""
        if self._observer is None or not begun or self.policy != SchedulingPolicy.FCFS:
            return False
        now_s = time.time()

        def prompt(request: Request) -> Prompt:
            left = request.num_tokens - request.num_computed_tokens
            work = self._prompt_work.of(left, request.num_computed_tokens)
            return Prompt(work, (now_s - request.arrival_time) * 1e3)

        first, *others = map(prompt, begun)
        if self.waiting:
            others.append(prompt(self.waiting.peek_request()))
        return any(self._pdmux_policy.overtakes(other, first) for other in others)

    def _work_of(self, output: SchedulerOutput) -> float:
        """The prefill work of a batch that has just been scheduled."""
        scheduled = output.num_scheduled_tokens.items()
        return sum(self._prompt_work.of(n, self.requests[i].num_computed_tokens - n) for i, n in scheduled)

    def _work_through(self, report: LaneReport | None) -> float:
        """The prefill work of the layers that were run in a step."""
        work = 0.0
        for run in report.runs if report is not None else ():
            if (batch := self._batch(run.batch_id)) is not None:
                work += batch.work * (run.end_layer - run.first_layer) / self._model_layers
        return work
