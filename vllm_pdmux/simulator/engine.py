# SPDX-License-Identifier: Apache-2.0
"""A scheduler and two lanes in which nothing is computed: each step only takes the time that the profile says.

It keeps what decides latency: admission in order of arrival, chunks, prefix reuse, the seats of running requests, one
batch in the lane, and a step for all that decode. It knows no preemption: the KV cache bounds only what is reused. Nor
does the lane run empty for fused steps, since it is empty after each batch.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from vllm_pdmux.policy import MOST_WAITING, Kind, Load, Observation, Policy, Prompt
from vllm_pdmux.simulator.profile import DeviceProfile
from vllm_pdmux.simulator.trace import BLOCK_TOKENS, Arrival

MODEL_LAYERS = 32  # no matter: progress counts in time
STOCK = "stock step"


@dataclass(frozen=True)
class Stock:
    """Stock vLLM with so many tokens in a step (max_num_batched_tokens)."""

    chunk_tokens: int = 8192


@dataclass
class Result:
    """What the requests saw, in ms; a gap counts once for each request that waited for it."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)  # mean time per token after the first, of each request
    gaps_ms: list[tuple[float, int]] = field(default_factory=list)  # (step, requests decoding in it)
    # time beside prefill, by group, or STOCK
    residency_ms: dict[int | str, float] = field(default_factory=lambda: defaultdict(float))
    longest_lane_wait_ms: float = 0.0  # between two advances of a batch in the lane
    makespan_ms: float = 0.0
    met: int = 0  # requests within both targets
    decisions: int = 0

    def itl_ms(self, share: float) -> float:
        """The ITL that `share` of all tokens after the first kept."""
        total, counted = sum(count for _, count in self.gaps_ms), 0
        for gap_ms, count in sorted(self.gaps_ms):
            counted += count
            if counted >= share * total:
                return gap_ms
        return 0.0


@dataclass
class _Request:
    arrival: Arrival
    computed: int = 0  # tokens of the prompt: reused ones, then those of chunks that were scheduled
    first_ms: float = 0.0
    is_begun: bool = False  # a chunk of it was scheduled

    @property
    def left(self) -> int:
        return self.arrival.prompt_tokens - self.computed


@dataclass
class _Batch:
    parts: list[tuple[_Request, int]]
    work: float
    total_ms: float
    done_ms: float = 0.0


class _Cache:
    """Blocks of prompts that were prefilled, the least recently used of which go first."""

    def __init__(self, kv_tokens: int):
        self._capacity = kv_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def reused(self, arrival: Arrival) -> int:
        count = 0
        for block in arrival.blocks:
            if block not in self._blocks:
                break
            count += 1
        # The last token is always computed, since its logits are wanted.
        return min(count * BLOCK_TOKENS, arrival.prompt_tokens - 1)

    def add(self, arrival: Arrival) -> None:
        for block in arrival.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def simulate(
    profile: DeviceProfile,
    arrivals: Sequence[Arrival],
    arm: Policy | Stock,
    max_prefill_tokens: int = 4096,
    max_num_seqs: int = 256,
    ttft_slo_ms: float = float("inf"),
    tpot_slo_ms: float = float("inf"),
    noise: Callable[[], float] = lambda: 1.0,
) -> Result:
    """Serve `arrivals` with stock vLLM, or with the lanes under a policy over the profile's groups, in order.

    `noise`: asked in each step in which something decodes, by what to multiply its time.
    """
    engine = _Engine(profile, arm, max_prefill_tokens, max_num_seqs, ttft_slo_ms, tpot_slo_ms, noise)
    return engine.serve(arrivals)


class _Engine:
    def __init__(
        self,
        profile: DeviceProfile,
        arm: Policy | Stock,
        max_prefill_tokens: int,
        max_num_seqs: int,
        ttft_slo_ms: float,
        tpot_slo_ms: float,
        noise: Callable[[], float],
    ):
        self._profile = profile
        self._stock = arm if isinstance(arm, Stock) else None
        self._policy: Policy | None = None if isinstance(arm, Stock) else arm
        self._max_prefill_tokens, self._seats = max_prefill_tokens, max_num_seqs
        self._ttft_slo_ms, self._tpot_slo_ms = ttft_slo_ms, tpot_slo_ms
        self._noise = noise
        self._result = Result()
        self._work = profile.prompt_work
        self._cache = _Cache(profile.kv_tokens)
        self._now_ms = 0.0
        self._waiting: deque[_Request] = deque()
        self._decoding: list[tuple[int, int, _Request]] = []  # heap of (the step that it ends with, tie, request)
        # From the lane while others decode: the step that is under way when they join is without them.
        self._joining: list[_Request] = []
        self._late = (0, 0.0)  # of those that decode for the first time in this step: how many, and since when, in ms
        self._step = self._ties = 0
        self._context_tokens = 0
        self._batch: _Batch | None = None
        self._overtaken = False  # whether the last batch has left out a prompt that is half done

    def serve(self, arrivals: Sequence[Arrival]) -> Result:
        coming = deque(arrivals)
        while coming or self._waiting or self._decoding or self._joining or self._batch:
            if not (self._waiting or self._decoding or self._joining or self._batch):
                self._now_ms = max(self._now_ms, coming[0].at_ms)
            while coming and coming[0].at_ms <= self._now_ms:
                self._waiting.append(_Request(coming.popleft()))
            if self._stock is not None:
                self._fused_step(self._stock.chunk_tokens - len(self._decoding))
            else:
                self._lane_step()
        self._result.makespan_ms = self._now_ms
        return self._result

    # --- steps -----------------------------------------------------------------------------------------------------

    def _lane_step(self) -> None:
        assert self._policy is not None
        if not self._decoding:
            self._begin_to_decode(self._joining)
            self._joining = []
        computed = self._waiting[0].computed if self._waiting else 0
        load = Load(
            len(self._decoding),
            self._max_prefill_tokens,
            MODEL_LAYERS,
            self._context_tokens,
            prefill_work=self._batch.work if self._batch else 0.0,
            computed_tokens=computed,
            oldest_wait_ms=self._oldest_wait_ms(),
            waiting_work=self._waiting_work(),
            first_tokens=self._first_tokens(),
            is_lane_busy=self._batch is not None,
        )
        if not self._decoding:
            return self._prefill_step()
        if self._batch is None and self._waiting:
            if tokens := self._policy.fused_tokens(load):
                return self._fused_step(tokens)
            self._batch = self._take(self._max_prefill_tokens)
        decode_ms = self._decode_ms()
        if self._batch is None:
            self._policy.observe(self._observation(Kind.DECODE, decode_ms, 0.0))
            return self._decode(decode_ms)
        self._result.decisions += 1
        number = self._policy.decide(load).group
        group, batch = self._profile.groups[number - 1], self._batch
        slowdown = self._profile.slowdown(group, len(self._decoding), self._context_tokens)
        pace = self._profile.pace(group, len(self._decoding), self._context_tokens)
        left_ms = batch.total_ms - batch.done_ms
        done_ms = min(decode_ms * slowdown * pace, left_ms)
        # Where the batch ends within the step, the rest of it runs alone.
        beside = done_ms / (decode_ms * slowdown * pace)
        step_ms = decode_ms * (1 + (slowdown - 1) * beside)
        batch.done_ms += done_ms
        work = batch.work * done_ms / batch.total_ms
        if beside == 1:
            self._policy.observe(self._observation(Kind.BESIDE, step_ms, work, number))
        self._result.residency_ms[number] += step_ms
        self._result.longest_lane_wait_ms = max(self._result.longest_lane_wait_ms, step_ms)
        self._decode(step_ms)
        if batch.done_ms >= batch.total_ms * (1 - 1e-9):
            self._batch = None
            self._join(batch, is_beside=True)

    def _waiting_work(self) -> float:
        first = islice(self._waiting, MOST_WAITING)
        return sum(self._work.of(request.left, request.computed) for request in first)

    def _first_tokens(self) -> tuple[tuple[float, float], ...]:
        """See `Load.first_tokens`."""
        found, work = [], 0.0
        if self._batch is not None:
            work = self._batch.work * (1 - self._batch.done_ms / self._batch.total_ms)
            ends = [request for request, _ in self._batch.parts if not request.left]
            found += [(work, self._now_ms - request.arrival.at_ms) for request in ends]
        for request in islice(self._waiting, MOST_WAITING):
            work += self._work.of(request.left, request.computed)
            found.append((work, self._now_ms - request.arrival.at_ms))
        return tuple(found)

    def _oldest_wait_ms(self) -> float:
        first = ([self._batch.parts[0][0]] if self._batch else []) + ([self._waiting[0]] if self._waiting else [])
        return self._now_ms - min((request.arrival.at_ms for request in first), default=self._now_ms)

    def _prefill_step(self) -> None:
        """Nothing decodes: the batch has the device to itself until it is done."""
        batch = self._batch or self._take(self._max_prefill_tokens)
        if batch is None:
            return
        self._batch = None
        step_ms = batch.total_ms - batch.done_ms + self._profile.prefill_fixed_ms
        self._now_ms += step_ms
        if self._policy is not None and not batch.done_ms:
            self._policy.observe(Observation(Kind.PREFILL, step_ms, prefill_work=batch.work))
        self._join(batch)

    def _fused_step(self, tokens: int) -> None:
        """Stock vLLM's step: all that decode, and chunks of prompts for the rest of the budget."""
        batch = self._take(max(tokens, 0))
        if not self._decoding:
            self._batch = batch
            return self._prefill_step()
        decode_ms = self._decode_ms()
        mix = self._profile.mix(len(self._decoding), self._context_tokens)
        step_ms = decode_ms if batch is None else self._profile.fused_ms(decode_ms, mix, batch.total_ms)
        if self._policy is not None and batch is not None:
            self._policy.observe(self._observation(Kind.FUSED, step_ms, batch.work))
        if batch is not None:
            self._result.residency_ms[STOCK] += step_ms
        self._decode(step_ms)
        if batch is not None:
            self._join(batch)

    def _decode_ms(self) -> float:
        return self._profile.decode_ms(len(self._decoding), self._context_tokens) * self._noise()

    def _observation(self, kind: Kind, step_ms: float, work: float, group: int = 0) -> Observation:
        return Observation(kind, step_ms, len(self._decoding), self._context_tokens, work, group)

    # --- requests --------------------------------------------------------------------------------------------------

    def _take(self, tokens: int) -> _Batch | None:
        """The next chunks; those of a prompt that is half done first, unless the policy lets others overtake it."""
        self._overtaken = not self._overtaken and self._is_overtaken()
        if not self._overtaken:
            return self._take_in_order(tokens)
        first = self._waiting.popleft()
        batch = self._take_in_order(tokens)
        self._waiting.appendleft(first)
        return batch

    def _is_overtaken(self) -> bool:
        if self._policy is None or len(self._waiting) < 2 or not self._waiting[0].is_begun:
            return False
        first, *others = takewhile(lambda request: request.is_begun, self._waiting)
        if len(self._waiting) > 1 + len(others):
            others.append(self._waiting[1 + len(others)])
        return any(self._policy.overtakes(self._prompt(other), self._prompt(first)) for other in others)

    def _prompt(self, request: _Request) -> Prompt:
        return Prompt(self._work.of(request.left, request.computed), self._now_ms - request.arrival.at_ms)

    def _take_in_order(self, tokens: int) -> _Batch | None:
        """The next chunks, in order of arrival; None when there is no prompt, no token or no seat."""
        parts: list[tuple[_Request, int]] = []
        total_ms, work, taken = 0.0, 0.0, 0
        seats = self._seats - len(self._decoding)
        while self._waiting and taken < tokens and len(parts) < seats:
            request = self._waiting[0]
            if not request.is_begun:
                request.computed = self._cache.reused(request.arrival)
            chunk = min(request.left, tokens - taken)
            total_ms += self._profile.prefill_ms(chunk, request.computed)
            work += self._work.of(chunk, request.computed)
            request.computed += chunk
            request.is_begun = True
            taken += chunk
            parts.append((request, chunk))
            if request.left:
                break
            self._waiting.popleft()
        return _Batch(parts, work, total_ms) if parts else None

    def _join(self, batch: _Batch, is_beside: bool = False) -> None:
        for request, _ in batch.parts:
            if request.left:
                continue
            self._cache.add(request.arrival)
            request.first_ms = self._now_ms
            if request.arrival.answer_tokens == 1:
                self._end(request)
            elif is_beside:
                self._joining.append(request)
            else:
                self._begin_to_decode([request])

    def _begin_to_decode(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            self._context_tokens += request.arrival.prompt_tokens
            self._ties += 1
            heapq.heappush(self._decoding, (self._step + request.arrival.answer_tokens - 1, self._ties, request))

    def _decode(self, step_ms: float) -> None:
        self._now_ms += step_ms
        self._step += 1
        late, late_ms = self._late
        self._result.gaps_ms.append((step_ms, len(self._decoding) - late))
        if late:
            self._result.gaps_ms.append((step_ms + late_ms, late))
        self._context_tokens += len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._step:
            request = heapq.heappop(self._decoding)[2]
            self._context_tokens -= request.arrival.prompt_tokens + request.arrival.answer_tokens - 1
            self._end(request)
        self._late = (len(self._joining), step_ms)
        self._begin_to_decode(self._joining)
        self._joining = []

    def _end(self, request: _Request) -> None:
        ttft_ms = request.first_ms - request.arrival.at_ms
        answer = request.arrival.answer_tokens
        tpot_ms = (self._now_ms - request.first_ms) / (answer - 1) if answer > 1 else 0.0
        self._result.ttft_ms.append(ttft_ms)
        if answer > 1:
            self._result.tpot_ms.append(tpot_ms)
        self._result.met += ttft_ms <= self._ttft_slo_ms and tpot_ms <= self._tpot_slo_ms
