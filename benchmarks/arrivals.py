# SPDX-License-Identifier: Apache-2.0
"""Serves requests that arrive as in a service, on an engine in this process, and says what each of them saw."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 512  # of a hash in a trace
LONGEST_SLEEP_S = 0.01


@dataclass(frozen=True)
class Request:
    """When a request arrives, the tokens of its prompt and its answer, and the hashes of its prompt's blocks."""

    at_ms: float
    prompt_tokens: int
    answer_tokens: int
    blocks: list[int]

    def prompt(self, number: int, vocabulary: int) -> list[int]:
        """Random tokens; those of equal hashes are equal, so that prefixes are reused as in the trace."""
        parts = [("block", block) for block in self.blocks] or [("request", number)]
        tokens: list[int] = []
        for place, part in enumerate(parts):
            left = self.prompt_tokens - len(tokens)
            is_last = place == len(parts) - 1
            generator = random.Random(f"{part}")
            tokens += generator.choices(range(10, vocabulary), k=left if is_last else min(left, BLOCK_TOKENS))
        return tokens


@dataclass
class Seen:
    """What the client of one request saw, in ms since the start."""

    first_ms: float = 0.0
    last_ms: float = 0.0
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)

    def token(self, now_ms: float, tokens: int) -> None:
        """The answer has `tokens` tokens at `now_ms`."""
        if tokens <= self.tokens:
            return
        if self.tokens:
            self.gaps_ms.append(now_ms - self.last_ms)
        else:
            self.first_ms = now_ms
        self.last_ms, self.tokens = now_ms, tokens


def serve(engine: Any, requests: list[Request], vocabulary: int, limit_s: float) -> dict[str, Any]:
    """Add each request to `engine` (vLLM's LLMEngine) when it is due and step until all are answered, or `limit_s`.

    For each request in order: `ttft_ms` from the time when it was due (None: not answered in time), `tpot_ms` (mean
    time per token after the first), `itl_p95_ms` and `itl_max_ms`. Over all tokens: `itl_p50_ms` to `itl_max_ms`.
    """
    prompts = [request.prompt(number, vocabulary) for number, request in enumerate(requests)]
    seen = [Seen() for _ in requests]
    unfinished = {str(place) for place in range(len(requests))}
    due = 0
    start_s = time.perf_counter()
    while unfinished and (now_ms := (time.perf_counter() - start_s) * 1e3) < limit_s * 1e3:
        while due < len(requests) and requests[due].at_ms <= now_ms:
            engine.add_request(str(due), {"prompt_token_ids": prompts[due]}, sampling(requests[due].answer_tokens))
            due += 1
        if not engine.has_unfinished_requests():
            time.sleep(min((requests[due].at_ms - now_ms) / 1e3, LONGEST_SLEEP_S))
            continue
        outputs = engine.step()
        now_ms = (time.perf_counter() - start_s) * 1e3
        for output in outputs:
            seen[int(output.request_id)].token(now_ms, len(output.outputs[0].token_ids))
            if output.finished:
                unfinished.discard(output.request_id)
    took_s = time.perf_counter() - start_s
    engine.abort_request(sorted(unfinished))
    while engine.has_unfinished_requests():
        engine.step()
    return {**summary(requests, seen), "took_s": took_s}


def sampling(tokens: int) -> Any:
    """An answer of so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def summary(requests: list[Request], seen: list[Seen]) -> dict[str, Any]:
    """See `serve`."""
    found: dict[str, Any] = {"ttft_ms": [], "tpot_ms": [], "itl_p95_ms": [], "itl_max_ms": []}
    for request, one in zip(requests, seen, strict=True):
        is_answered = one.tokens >= request.answer_tokens
        found["ttft_ms"].append(round(one.first_ms - request.at_ms, 2) if is_answered else None)
        found["tpot_ms"].append(round(sum(one.gaps_ms) / len(one.gaps_ms), 3) if one.gaps_ms else 0.0)
        found["itl_p95_ms"].append(round(quantile(one.gaps_ms, 0.95), 3))
        found["itl_max_ms"].append(round(max(one.gaps_ms, default=0.0), 3))
    gaps_ms = [gap for one in seen for gap in one.gaps_ms]
    over_all = {f"itl_p{share}_ms": quantile(gaps_ms, share / 100) for share in (50, 90, 95, 99)}
    return {"seen": found, **over_all, "itl_max_ms": max(gaps_ms, default=0.0), "tokens": sum(s.tokens for s in seen)}


def quantile(values: list[float], share: float) -> float:
    """Of values in any order; 0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def share_within(requests: dict[str, list], ttft_slo_ms: float, itl_slo_ms: float, itl: str = "tpot_ms") -> float:
    """The share of requests that were answered with a TTFT and an ITL (`itl`: which of them) within the targets."""
    pairs = list(zip(requests["ttft_ms"], requests[itl], strict=True))
    return sum(ttft is not None and ttft <= ttft_slo_ms and gap <= itl_slo_ms for ttft, gap in pairs) / len(pairs)
