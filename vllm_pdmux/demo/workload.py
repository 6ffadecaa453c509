# SPDX-License-Identifier: Apache-2.0
"""What the engine is asked: short chats, and one long document that arrives while they stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_pdmux.demo import DemoError, document

DOCUMENT = "document"

_QUESTIONS = (
    "Why is the sky blue?",
    "Why does a bicycle stay upright?",
    "How do weather and climate differ?",
    "How do I keep a houseplant alive?",
    "Why do leaves turn red in autumn?",
    "What causes the tides of the sea?",
    "How does a refrigerator cool food?",
    "Why do cats purr?",
)
# Tokens every chat has streamed when the document arrives: enough to see that they run.
_ARRIVES_AFTER_TOKENS = 4
_WARM_UP_MAX_TOKENS = 12

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Prompt:
    """One request."""

    name: str  # its request id
    question: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """The requests of one run. Both engines get the same."""

    chats: tuple[Prompt, ...]
    document: Prompt
    max_tokens: int  # of every answer
    arrives_after: int  # tokens every chat has streamed when the document arrives
    ignore_eos: bool = False  # every answer has all its tokens
    cache_salt: str | None = None  # runs with different ones find nothing of each other in the prefix cache

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return *self.chats, self.document

    def warm_up(self) -> "Workload":
        """The same with short answers. The document stays as long as it is: the first forward of a size is slower."""
        return replace(self, chats=self.chats[:2], max_tokens=min(self.max_tokens, _WARM_UP_MAX_TOKENS))


def build(encode: Encode, chats: int, document_tokens: int, max_tokens: int) -> Workload:
    """The workload in the tokens of `encode` (a user's message -> prompt token ids)."""
    questions = [_QUESTIONS[number % len(_QUESTIONS)] for number in range(chats)]
    prompts = [Prompt(f"chat {n}", text, tuple(encode(text))) for n, text in enumerate(questions, start=1)]
    # A third of a short answer leaves two thirds to stream beside the prefill.
    arrives_after = max(1, min(_ARRIVES_AFTER_TOKENS, max_tokens // 3))
    return Workload(tuple(prompts), document_prompt(encode, document_tokens), max_tokens, arrives_after)


def document_prompt(encode: Encode, tokens: int, question: str = document.QUESTION) -> Prompt:
    """The longest document of whole sentences whose prompt has at most `tokens` tokens. DemoError when none has."""
    least, most = document.shortest(), max(document.shortest(), tokens)  # a sentence has more than one token
    shortest_tokens = len(encode(document.text(least, question)))
    if shortest_tokens > tokens:
        raise DemoError(
            f"--document-tokens is {tokens} but the shortest document has {shortest_tokens} tokens: raise it"
        )
    while least < most:
        middle = (least + most + 1) // 2
        if len(encode(document.text(middle, question))) <= tokens:
            least = middle
        else:
            most = middle - 1
    return Prompt(DOCUMENT, question, tuple(encode(document.text(least, question))))


def check_length(document_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """DemoError when the document and its answer are longer than the model's context."""
    if document_tokens + max_tokens > max_model_len:
        raise DemoError(
            f"a document of {document_tokens} tokens and an answer of {max_tokens} do not fit max_model_len "
            f"{max_model_len}: lower --document-tokens or --max-tokens, or raise --max-model-len if the model allows it"
        )


def encoder(tokenizer: Any) -> Encode:
    """A user's message -> token ids: in the tokenizer's chat template when it has one, else the plain text."""
    if not getattr(tokenizer, "chat_template", None):
        plain: Encode = tokenizer.encode
        return plain

    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)  # the template has written them
        return token_ids

    return encode
