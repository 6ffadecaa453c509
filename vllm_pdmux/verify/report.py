# SPDX-License-Identifier: Apache-2.0
"""The result: what failed, the numbers of both engines, and a block of text for a bug report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vllm_pdmux.config import Resolved
from vllm_pdmux.demo.comparison import summary
from vllm_pdmux.verify.judge import Difference, Verdict, judge
from vllm_pdmux.verify.processes import Served
from vllm_pdmux.verify.workload import CHATS

# Those that change what runs. Others are not told: a variable may hold a secret.
_ENVIRONMENT = (
    *("PDMUX", "PDMUX_CONFIG", "PDMUX_ALLOW_UNTESTED", "VLLM_PLUGINS"),
    *("VLLM_USE_V2_MODEL_RUNNER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
_NO_LANE = ("off", "slo")  # policies that may leave the lane empty: slo may take fused steps instead


@dataclass(frozen=True)
class Result:
    """Both engines on the same requests."""

    arguments: Mapping[str, Any]  # vLLM's engine arguments, as given
    resolved: Resolved
    stock: Served
    pdmux: Served

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.stock.answers, self.pdmux.answers, self.stock.facts["dtype"])

    @property
    def failure(self) -> str | None:
        """What failed, in one line; None: the tokens are stock's, be it that the policy has not used the lane."""
        verdict = self.verdict
        if self.pdmux.error is not None:
            return f"the engine with the plugin failed while it served: {self.pdmux.error}"
        if verdict.stock_not_finite is not None:
            where = verdict.stock_not_finite
            return f"stock vLLM's own logprobs are not finite ({where}), so there is nothing to compare with"
        if not verdict.equal:
            first = verdict.wrong[0]
            more = f" and of {len(verdict.wrong) - 1} more" if len(verdict.wrong) > 1 else ""
            return f"not stock's tokens: {first} from token {verdict.other[first]} on{more} (rule: {verdict.rule})"
        if self._alone:
            return f"nothing was decoding when {self._alone[0]} arrived, so nothing was verified: raise --max-tokens"
        if not self._is_lane_used and self.resolved.config.policy not in _NO_LANE:
            return "no decode step had prefill layers beside it, so nothing was verified: raise --document-tokens"
        return None

    @property
    def tokens_equal(self) -> bool | None:
        """Whether nothing has failed; None: nothing was verified, as no decode step had prefill layers beside it."""
        if not self._is_lane_used and self.verdict.equal and self.pdmux.error is None:
            return None
        return self.failure is None

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        verdict, found = self.verdict, []
        if verdict.other and verdict.equal:
            found.append(f"{len(verdict.other)} answers leave stock's at a near tie; what follows it is not compared")
        if verdict.is_suspicious:
            found.append(
                f"an answer has all of stock's tokens, but a logprob is {verdict.to_stock_in_equal.nats:.4f} off "
                f"({verdict.to_stock_in_equal.where}), above {verdict.suspicious_nats:.4f}: please report this"
            )
        if "cpu" in self.stock.facts["device"]["platform"].lower():
            found.append("a CPU has no SMs to split: the latencies show the mechanism, not a speed-up")
        if not self._is_lane_used and self.resolved.config.policy in _NO_LANE:
            found.append(f"no decode step had prefill layers beside it, as policy {self.resolved.config.policy} chose")
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it but the answers; times in ms, null where there is none or where it is not finite."""
        verdict = self.verdict
        return {
            "tokens_equal": self.tokens_equal,
            "failure": self.failure,
            "notes": self.notes,
            "rule": verdict.rule,
            "tokens": {
                "total": verdict.tokens,
                "compared": verdict.compared,
                "first_other": dict(verdict.other),
                "wrong": list(verdict.wrong),
                "largest_logprob_difference": _plain(verdict.to_stock),
                "stock_to_itself": _plain(verdict.stock_to_itself),
                "tolerance": verdict.tolerance_nats,
            },
            "prompt_tokens": dict(self.stock.prompt_tokens),
            "beside_steps": dict(self.pdmux.beside_steps),
            "stock": latencies(self.stock.rounds),
            "pdmux": latencies(self.pdmux.rounds),
            "engine_arguments": dict(self.arguments),
            "settings": self.resolved.describe(),
            **self.stock.facts,
            "report": "\n".join(block(self)),
        }

    @property
    def _is_lane_used(self) -> bool:
        return sum(self.pdmux.beside_steps.values()) > 0

    @property
    def _alone(self) -> list[str]:
        """Requests beside which nothing was decoding, which cannot show anything; chats begin alone."""
        return [
            name
            for given in self.pdmux.answers.values()
            for name, answer in given.items()
            if self.pdmux.kinds[name] != CHATS and answer.decoding == 0
        ]


def _plain(difference: Difference) -> dict[str, Any]:
    """JSON has no infinity."""
    return vars(difference) | {"nats": difference.nats if math.isfinite(difference.nats) else None}


def latencies(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all rounds together: ITL of the chats, during the long prompt's prefill and overall, as p50, p99 and max; TTFT
    of the long prompt as median and max. In ms."""
    ttft = [one["ttft_ms"] for one in rounds if one["ttft_ms"] is not None]
    return {
        "ttft_ms": {"p50": round(median(ttft), 2), "max": round(max(ttft), 2)} if ttft else None,
        "itl_during_prefill_ms": _itl([ms for one in rounds for ms in one["itl_during_prefill_ms"]]),
        "itl_ms": _itl([ms for one in rounds for ms in one["itl_ms"]]),
        "rounds": len(rounds),
    }


def _itl(times_ms: Sequence[float]) -> dict[str, float] | None:
    if (found := summary(times_ms)) is None:
        return None
    return {"p50": round(found.median, 2), "p99": round(found.p99, 2), "max": round(found.max, 2)}


def rows(result: Result) -> Iterator[tuple[str, str, str]]:
    """(what, stock, plugin), as text."""
    stock, pdmux = latencies(result.stock.rounds), latencies(result.pdmux.rounds)
    yield "TTFT of the long prompt, p50 / max ms", _said(stock["ttft_ms"]), _said(pdmux["ttft_ms"])
    beside = "ITL of running requests during its prefill, p50 / p99 / max ms"
    yield beside, _said(stock["itl_during_prefill_ms"]), _said(pdmux["itl_during_prefill_ms"])
    overall = "ITL of running requests overall, p50 / p99 / max ms"
    yield overall, _said(stock["itl_ms"]), _said(pdmux["itl_ms"])
    yield "decode steps with prefill layers beside them", "-", str(sum(result.pdmux.beside_steps.values()))


def _said(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else " / ".join(f"{ms:.1f}" for ms in values.values())


def outcome(result: Result) -> Iterator[str]:
    """The verdict, the rule, and the notes, a line each."""
    verdict = result.verdict
    failed = result.failure
    ties = f", but for {len(verdict.other)} near ties" if verdict.other else ""
    if failed is not None:
        yield f"FAILED: {failed}"
    elif result.tokens_equal is None:
        policy = result.resolved.config.policy
        yield f"tokens: not verified in the lane, which policy {policy} did not use; equal to stock's without it{ties}"
    else:
        yield f"tokens: equal to stock vLLM's{ties}"
    yield f"rule: {verdict.rule}"
    yield (
        f"compared: {verdict.compared} of {verdict.tokens} tokens; largest difference of a logprob "
        f"{verdict.to_stock.nats:.4f} nats to stock, {verdict.stock_to_itself.nats:.4f} of stock to itself"
    )
    for note in result.notes:
        yield f"note: {note}"


def block(result: Result) -> Iterator[str]:
    """Lines for a bug report. Of the environment it holds only variables that it names."""
    facts = dict(result.stock.facts)
    yield "vllm-pdmux verify"
    for name in ("versions", "device"):
        yield f"{name}: {_pairs(facts.pop(name))}"
    yield f"engine: {_pairs(result.arguments)}"
    yield f"resolved: {_pairs(facts)}"
    yield f"settings: {result.resolved.describe()}"
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    yield f"environment: {_pairs(environment) or 'none set'}"
    yield f"prompt tokens: {_pairs(result.stock.prompt_tokens)}"
    yield from outcome(result)
    for where in result.verdict.wrong[:5]:
        schedule, _, name = where.partition(": ")
        place = result.verdict.other[where]
        both = [given.get(schedule, {}).get(name) for given in (result.stock.answers, result.pdmux.answers)]
        tokens = [None if one is None else one.tokens[max(0, place - 3) : place + 5] for one in both]
        yield f"{where}: tokens from {max(0, place - 3)} on: stock {tokens[0]}, plugin {tokens[1]}"
    for what, stock, pdmux in rows(result):
        yield f"{what}: stock {stock}, plugin {pdmux}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
