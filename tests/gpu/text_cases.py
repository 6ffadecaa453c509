# SPDX-License-Identifier: Apache-2.0
"""Schedules of requests with real text, for a model with real weights: chats, and documents of up to 1,800 tokens."""

from __future__ import annotations

import random

from driver import Arrival
from schedule_cases import fresh, params, plain

QUESTIONS = (
    "Name three primary colors and say where each is found in nature.",
    "Write a story about a dog that learns to swim.",
    "Explain to a child why the sky is blue.",
    "How is bread made? Describe each step.",
)
DOCUMENT_TOKENS = (400, 900, 1300, 1800, 650, 1600)
# What a model can say under it ends: every string, number and array is bounded.
SCHEMA = {
    "type": "object",
    "properties": {
        "keeper": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "weather": {"enum": ["rain", "snow", "sun", "fog"]},
        "goods": {"type": "array", "items": {"enum": ["tea", "salt", "wool", "glass"]}, "minItems": 1, "maxItems": 3},
        "closed": {"type": "boolean"},
    },
    "required": ["keeper", "year", "weather", "goods", "closed"],
    "additionalProperties": False,
}
_SENTENCES = (
    "In {year} {name} kept the {place}, where {number} crates of {goods} were stored.",
    "The {place} lay {number} miles from the town, and {name} walked there in the {weather}.",
    "{name} wrote: the {weather} has held us for {number} days, and the {goods} is nearly gone.",
    "Nobody could say who had built the {place}; {name} believed that it was older than {year}.",
    "A ship with {number} sailors brought {goods} from the north, and {name} paid them in silver.",
    "When the {weather} came again, the door of the {place} was shut until the spring of {year}.",
)
_WORDS = {
    "name": ("Anna Berg", "Tomas Lind", "old Mr. Farrow", "Ruth Okafor", "Captain Hale", "the miller's daughter"),
    "place": ("lighthouse", "granary", "stone bridge", "post office", "chapel", "customs house"),
    "goods": ("tea", "salt", "wool", "glass"),
    "weather": ("rain", "snow", "sun", "fog"),
}


def document(tokenizer, tokens: int, seed: int) -> str:
    """Sentences that no other seed has in this order, `tokens` tokens of them or a few more."""
    chosen = random.Random(seed)
    sentences, count = [], 0
    while count < tokens:
        words = {kind: chosen.choice(among) for kind, among in _WORDS.items()}
        numbers = {"year": chosen.randrange(1900, 2000), "number": chosen.randrange(3, 90)}
        sentences.append(chosen.choice(_SENTENCES).format(**words, **numbers))
        count += len(tokenizer.encode(" " + sentences[-1], add_special_tokens=False))
    return " ".join(sentences)


def serve(driver, sampling, delay: int):
    """Four chats stream; documents come one after another, then questions about one that was read already."""
    tokenizer = driver.llm.get_tokenizer()

    def ask(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    chats = [Arrival(f"chat{i}", ask(text), params(max_tokens=150)) for i, text in enumerate(QUESTIONS)]
    texts = [document(tokenizer, tokens, seed) for seed, tokens in enumerate(DOCUMENT_TOKENS)]
    documents = [
        Arrival(f"document{i}", ask(f"{text} What goods are named, and who kept them?"), sampling, 6 + 9 * i * delay)
        for i, text in enumerate(texts)
    ]
    again = [
        Arrival(f"again{i}", ask(f"{texts[1]} {question}"), sampling, 70 + 4 * i * delay)
        for i, question in enumerate(("Who is mentioned first?", "How was the weather?", "Which year is the latest?"))
    ]
    fresh(driver)
    return plain(driver.run([*chats, *documents, *again]))


def structured(driver, delay: int):
    """The answers about documents are JSON of a schema; those of the chats are free."""
    from vllm.sampling_params import StructuredOutputsParams

    schema = StructuredOutputsParams(json=SCHEMA)
    return serve(driver, params(max_tokens=150, ignore_eos=False, structured_outputs=schema), delay)


CASES = {
    "text": lambda driver, delay: serve(driver, params(), delay),
    "text, penalties": lambda driver, delay: serve(
        driver, params(presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2), delay
    ),
    "text, prompt logprobs": lambda driver, delay: serve(driver, params(max_tokens=20, prompt_logprobs=2), delay),
    "text, JSON": structured,
}
