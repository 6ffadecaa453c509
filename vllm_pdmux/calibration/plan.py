# SPDX-License-Identifier: Apache-2.0
"""What to measure: points that span what an engine of these limits can meet, in few seconds."""

from __future__ import annotations

from dataclasses import dataclass

# (decoding requests, tokens of context of each) of an engine that allows them; a smaller one has them in proportion.
# The first ones are measured beside prefill too. The second lies between the others, so that it can be held out.
_LOADS = ((16, 1024), (48, 4096), (128, 2048), (32, 16384), (1, 512), (4, 16384), (64, 1024), (250, 512), (96, 3072))
_BESIDE = 4
_LARGEST_BATCH, _LONGEST_CONTEXT = 250, 16384
# (new tokens, tokens reused) of prompts, likewise.
_PROMPTS = (
    (256, 0),
    (512, 0),
    (1024, 0),
    (2048, 0),
    (4096, 0),
    (8192, 0),
    (512, 4096),
    (2048, 4096),
    (1024, 16384),
    (4096, 16384),
)
_LONGEST_PROMPT = 8192
_CHUNKS, _SHORTEST_STEP = (256, 1024), 2048  # prompt tokens of fused steps, and the step that has room for them
# Of the KV cache: what contexts may take, so that they grow and prompts find blocks.
_KV_SHARE = 0.5
FREE_SEATS = 4  # of requests, for prompts beside those that decode
SMALLEST_PROMPT = 2  # a step of one token counts as a decode


@dataclass(frozen=True)
class Limits:
    """Of an engine."""

    max_model_len: int
    max_num_seqs: int
    step_tokens: int  # in one stock step, at most
    lane_tokens: int  # in one batch of the prefill lane, at most
    kv_tokens: int
    block_tokens: int


@dataclass(frozen=True)
class DecodeLoad:
    """Requests that decode, each with so many tokens of context, whole blocks."""

    batch: int
    context_tokens: int


def decode_loads(limits: Limits) -> list[DecodeLoad]:
    """The loads of decode alone, different ones; those beside prefill first."""
    batches = min(1.0, max(1, limits.max_num_seqs - FREE_SEATS) / _LARGEST_BATCH)
    contexts = min(1.0, limits.max_model_len / 2 / _LONGEST_CONTEXT)
    most = max(max(1, round(batch * batches)) * context * contexts for batch, context in _LOADS)
    contexts *= min(1.0, _KV_SHARE * limits.kv_tokens / most)
    loads = [
        DecodeLoad(max(1, round(batch * batches)), _blocks(context * contexts, limits) or limits.block_tokens)
        for batch, context in _LOADS
    ]
    return list(dict.fromkeys(loads))


def beside_loads(limits: Limits) -> list[DecodeLoad]:
    """Those of the loads that are measured beside prefill."""
    return decode_loads(limits)[:_BESIDE]


def prompts(limits: Limits) -> list[tuple[int, int]]:
    """(new tokens, reused tokens) of prompts that are prefilled in one step; reused ones are whole blocks."""
    new = min(1.0, min(limits.step_tokens, limits.max_model_len // 2) / _LONGEST_PROMPT)
    reused = min(1.0, (limits.max_model_len / 2 - limits.block_tokens) / _LONGEST_CONTEXT)
    points = [(max(SMALLEST_PROMPT, int(n * new)), _blocks(r * reused, limits)) for n, r in _PROMPTS]
    room = min(limits.max_model_len - 1, int(limits.kv_tokens * _KV_SHARE))
    return list(dict.fromkeys((n, r) for n, r in points if n + r <= room))


def lane_prompt(limits: Limits) -> int:
    """Tokens of the prompts that are prefilled beside decode: one batch of the lane each."""
    return max(SMALLEST_PROMPT, min(limits.lane_tokens, limits.max_model_len - 2, limits.kv_tokens // 16))


def fused_chunks(limits: Limits) -> list[int]:
    """Prompt tokens of the fused steps."""
    chunks = min(1.0, limits.step_tokens / _SHORTEST_STEP)
    return list(dict.fromkeys(max(SMALLEST_PROMPT, int(chunk * chunks)) for chunk in _CHUNKS))


def _blocks(tokens: float, limits: Limits) -> int:
    return int(tokens) // limits.block_tokens * limits.block_tokens
