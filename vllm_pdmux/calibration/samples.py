# SPDX-License-Identifier: Apache-2.0
"""What was measured: one object for each point."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """A mixed group: how its lanes share the device, and the SMs of each."""

    sharing: str
    prefill_sms: int
    decode_sms: int


@dataclass(frozen=True)
class DecodeSample:
    """A decode step with nothing beside it."""

    batch: int
    context_tokens: int  # of all requests together
    ms: float


@dataclass(frozen=True)
class PrefillSample:
    """The prefill of one prompt with nothing beside it."""

    new_tokens: int
    reused_tokens: int  # of the prompt's beginning, whose KV is there already
    ms: float


@dataclass(frozen=True)
class BesideSample:
    """Decode steps with prompts of `prompt_tokens` going through the prefill lane one after another."""

    group: int  # 1 to the number of divisions
    load: int  # the same number for what all groups were measured with
    batch: int
    context_tokens: int  # of all decoding requests together
    prompt_tokens: int
    itl_p50_ms: float
    prefill_tokens_per_s: float
    alone_ms: float | None = None  # a step of this load alone, where it was measured in the same run


@dataclass(frozen=True)
class FusedSample:
    """A stock step that decodes and prefills a chunk in one batch."""

    batch: int
    context_tokens: int
    chunk_tokens: int
    computed_tokens: int  # of the prompt before the chunk
    ms: float
    alone_ms: float | None = None  # as above


@dataclass(frozen=True)
class Samples:
    """One calibration."""

    decode: tuple[DecodeSample, ...]
    prefill: tuple[PrefillSample, ...]
    beside: tuple[BesideSample, ...] = ()
    fused: tuple[FusedSample, ...] = ()
    divisions: tuple[Division, ...] = ()
    kv_tokens: int = 1  # that the KV cache holds
