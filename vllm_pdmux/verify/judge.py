# SPDX-License-Identifier: Apache-2.0
"""Are the plugin's tokens stock vLLM's? Two rules, by the dtype.

In 32 bits: token by token. In 16 bits the sums of a batch depend on its size, so that stock vLLM itself chooses another
of two tokens that are nearly as likely when the same requests arrive at other times. There an answer with another token
is stock's when, up to that token, all logprobs are as near to stock's as stock's in one schedule are to its own in the
other, times `SLACK`. A wrong KV block or a wrong state shows as a difference many times larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_pdmux.verify.answers import Answer
from vllm_pdmux.verify.workload import PLAIN, SCHEDULES, STAGGERED

SLACK = 2.5  # of the largest difference that stock shows against itself; that of tests/gpu
EXACT_DTYPES = ("float32", "float64")
EXACT_SUSPICIOUS_NATS = 0.01  # of a logprob in 32 bits, where sums in other batches differ by far less

Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Difference:
    """Between two logprobs of one token in nats, and where it is. Infinite where one of them is not finite."""

    nats: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of the comparison."""

    is_exact: bool  # which rule was used
    equal: bool  # every token is stock's, or as near to it as the rule allows
    tokens: int  # of stock's answers
    compared: int  # of them: those up to the first other one of each answer
    other: Mapping[str, int]  # "schedule: request" -> place of its first token that is not stock's
    wrong: tuple[str, ...]  # those of `other` that the rule does not allow
    to_stock: Difference  # the largest between plugin and stock
    to_stock_in_equal: Difference  # the same of answers that are not in `other`
    stock_to_itself: Difference  # the largest between stock's two schedules
    stock_not_finite: str | None  # where stock itself has such a logprob, so that nothing can be told from its answers

    @property
    def tolerance_nats(self) -> float:
        """Of a logprob, in an answer with another token; 0 with the rule for 32 bits."""
        return _tolerance_nats(self.is_exact, self.stock_to_itself)

    @property
    def suspicious_nats(self) -> float:
        """Of a logprob, in an answer whose tokens are all stock's: what is above it should be looked into."""
        return EXACT_SUSPICIOUS_NATS if self.is_exact else self.tolerance_nats

    @property
    def is_suspicious(self) -> bool:
        """Whether an answer has all of stock's tokens, but a logprob that is too far off for that to be trusted."""
        return self.to_stock_in_equal.nats > self.suspicious_nats

    @property
    def rule(self) -> str:
        """The rule in one line."""
        if self.is_exact:
            return "exact (32 bits): every token must be stock's"
        return (
            f"near ties (16 bits): another token is allowed where no logprob up to it is further from stock's than "
            f"{self.tolerance_nats:.4f}, {SLACK} times what stock in other batches is from itself"
        )


def judge(stock: Mapping[str, Answers], pdmux: Mapping[str, Answers], dtype: str) -> Verdict:
    """Both by schedule and request. An answer that the plugin has not given is wrong from its first token on."""
    is_exact = dtype in EXACT_DTYPES
    own = max((widest(stock[PLAIN][name], stock[STAGGERED][name], name) for name in stock[PLAIN]), key=_size)
    pairs = {
        f"{schedule}: {name}": (pdmux.get(schedule, {}).get(name, Answer([], [])), answer)
        for schedule in SCHEDULES
        for name, answer in stock[schedule].items()
    }
    places = {where: first_other(*pair) for where, pair in pairs.items()}
    others = {where: place for where, place in places.items() if place is not None}
    off = {where: widest(mine, theirs, where) for where, (mine, theirs) in pairs.items()}
    allowed = _tolerance_nats(is_exact, own)
    not_finite = next(_not_finite(stock), None)
    # An answer that is shorter has no other token whose logprobs could excuse it.
    wrong = [w for w, at in others.items() if is_exact or off[w].nats > allowed or at >= len(pairs[w][0].tokens)]
    return Verdict(
        is_exact=is_exact,
        equal=not wrong and not_finite is None,
        tokens=sum(len(theirs.tokens) for _, theirs in pairs.values()),
        compared=sum(others.get(where, len(theirs.tokens)) for where, (_, theirs) in pairs.items()),
        other=others,
        wrong=tuple(wrong),
        to_stock=max(off.values(), key=_size),
        to_stock_in_equal=max((one for w, one in off.items() if w not in others), key=_size, default=Difference()),
        stock_to_itself=own,
        stock_not_finite=not_finite,
    )


def first_other(mine: Answer, theirs: Answer) -> int | None:
    """The place of the first token that differs, or at which one of the two has ended."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    place = next((at for at, (here, there) in enumerate(pairs) if here != there), None)
    if place is None and len(mine.tokens) != len(theirs.tokens):
        return min(len(mine.tokens), len(theirs.tokens))
    return place


def widest(mine: Answer, theirs: Answer, name: str) -> Difference:
    """The largest difference of a logprob up to the first other token, that place included."""
    other = first_other(mine, theirs)
    until = None if other is None else other + 1
    found = Difference()
    for at, (here, there) in enumerate(zip(mine.logprobs[:until], theirs.logprobs[:until], strict=False)):
        for token, nats in _differences(here, there):
            found = max(found, Difference(nats, f"{name}, token {at}, id {token}"), key=_size)
    return found


def _differences(here: Mapping[int, float], there: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Of each token that either side knows, (id, nats). Where one side does not have it, it is no likelier there than
    the least likely one that it has: so much at least is the difference."""
    for one, other in ((here, there), (there, here)):
        floor = min(other.values())
        for token, value in one.items():
            if token not in other:
                yield token, max(0.0, _finite_or_inf(value - floor))
            elif one is here:
                yield token, _finite_or_inf(abs(value - other[token]))


def _finite_or_inf(nats: float) -> float:
    """NaN is neither above a tolerance nor the largest of anything."""
    return nats if math.isfinite(nats) else math.inf


def _not_finite(given: Mapping[str, Answers]) -> Iterator[str]:
    """Where logprobs are not finite."""
    for schedule, by_name in given.items():
        for name, answer in by_name.items():
            for at, place in enumerate(answer.logprobs):
                yield from (f"{schedule}: {name}, token {at}, id {t}" for t, v in place.items() if not math.isfinite(v))


def _tolerance_nats(is_exact: bool, own: Difference) -> float:
    """An engine whose difference to itself is infinite must not excuse everything."""
    return 0.0 if is_exact or math.isinf(own.nats) else SLACK * own.nats


def _size(difference: Difference) -> float:
    return difference.nats
