# SPDX-License-Identifier: Apache-2.0
"""The requests: chats that stream, and meanwhile a long prompt, several prompts at once, and prompts with its prefix.

They arrive when others have so many tokens, and not at times or steps: so both engines meet the same situations
although one needs more steps for a prompt than the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_pdmux.demo import document
from vllm_pdmux.demo.workload import DOCUMENT, Encode, build, document_prompt

PLAIN, STAGGERED = SCHEDULES = ("plain", "staggered")
CHATS, LONG, AT_ONCE, PREFIX = KINDS = ("short", "long", "several at once", "shared prefix")

_ANSWER_TOKENS = 24  # of every prompt that is no chat: enough to read its KV many times
_ONES_AT_ONCE = 3
_OTHER_QUESTIONS = ("What is kept in the oil store?", "Who keeps bees?")


@dataclass(frozen=True)
class Asked:
    """One request."""

    name: str
    kind: str  # one of KINDS
    token_ids: tuple[int, ...]
    max_tokens: int
    after: Mapping[str, int] = field(default_factory=dict)  # it arrives when each of these has so many tokens


def requests(encode: Encode, chats: int, document_tokens: int, max_tokens: int, schedule: str) -> tuple[Asked, ...]:
    """The requests in the tokens of `encode` (a user's message -> prompt token ids), those of a schedule in order.

    `max_tokens`: of a chat's answer, and `document_tokens` of the long prompt at most. Both schedules have the same
    requests; they differ in which of them are in one batch. Raises DemoError for a document that is too short.
    """
    is_plain = schedule == PLAIN
    base = build(encode, chats, document_tokens, max_tokens)
    answer_tokens = min(_ANSWER_TOKENS, max_tokens)
    streaming = min(8 if is_plain else 13, max_tokens // 2)
    asked = []
    for number, chat in enumerate(base.chats):
        before = {} if is_plain or number == 0 else {base.chats[number - 1].name: 3}
        asked.append(Asked(chat.name, CHATS, chat.token_ids, max_tokens, before))
    # The last chat of a staggered schedule begins last.
    long = Asked(DOCUMENT, LONG, base.document.token_ids, answer_tokens, {base.chats[-1].name: streaming})
    at_once = [_one_at_once(encode, number, len(long.token_ids)) for number in range(1, _ONES_AT_ONCE + 1)]
    after_long = {DOCUMENT: 1 if is_plain else 3}
    asked += [long, *(Asked(name, AT_ONCE, ids, answer_tokens, after_long) for name, ids in at_once)]
    after = {name: 1 for name, _ in at_once}
    for number, question in enumerate(_OTHER_QUESTIONS, start=1):
        prompt = document_prompt(encode, max(document_tokens, len(long.token_ids)), question)
        asked.append(Asked(f"prefix {number}", PREFIX, prompt.token_ids, answer_tokens, after))
        after = after if is_plain else {f"prefix {number}": 2}
    return tuple(asked)


def _one_at_once(encode: Encode, number: int, longest: int) -> tuple[str, tuple[int, ...]]:
    """A prompt of its own from its first word on, of a quarter of `longest` tokens or a few more."""
    sentences, ids = 1, tuple(encode(_report(number, 1)))
    while len(ids) < longest // 4:
        sentences += 1
        ids = tuple(encode(_report(number, sentences)))
    return f"at once {number}", ids


def _report(number: int, sentences: int) -> str:
    return f"{number * 111} days at sea. {document.text(sentences)}"
