# SPDX-License-Identifier: Apache-2.0
"""Arrivals of requests: from the traces that are in use, or steady."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

BLOCK_TOKENS = 512  # of Mooncake's hash ids


class TraceError(ValueError):
    """A file that is no trace; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Arrival:
    """A request: when it arrives, the tokens of its prompt and of its answer, and hashes of its prompt's blocks."""

    at_ms: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: str, limit: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """The first `limit` requests of an Azure LLM trace (CSV) or a Mooncake trace (JSONL), in order of arrival.

    `speed`: how many times faster they arrive. Times count from the first request. Raises TraceError.
    """
    read = _azure if path.endswith(".csv") else _mooncake
    number = 0
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            found = []
            for number, arrival in enumerate(islice(read(file), limit), start=1):
                found.append(arrival)
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read ({error.strerror}): correct path or rights") from None
    except (KeyError, TypeError, ValueError) as error:
        form = "CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
        if read is _mooncake:
            form = "JSONL with timestamp, input_length, output_length"
        raise TraceError(f"trace {path}: request {number + 1} is wrong ({error!r}): it must be {form}") from None
    if not found:
        raise TraceError(f"trace {path}: has no requests")
    found.sort(key=lambda arrival: arrival.at_ms)
    first_ms = found[0].at_ms
    return [
        Arrival((one.at_ms - first_ms) / speed, max(1, one.prompt_tokens), max(1, one.answer_tokens), one.blocks)
        for one in found
    ]


def steady(rate_per_s: float, count: int, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> list[Arrival]:
    """`count` requests that arrive at random (Poisson) with `rate_per_s`, all of one size."""
    generator, at_ms, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Arrival(at_ms, prompt_tokens, answer_tokens))
        at_ms += generator.expovariate(rate_per_s) * 1e3
    return found


def _azure(file) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # Seven digits of a second; Python reads six.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield Arrival(moment.timestamp() * 1e3, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(file) -> Iterator[Arrival]:
    for line in file:
        row = json.loads(line)
        blocks = tuple(row.get("hash_ids", ()))
        yield Arrival(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), blocks)
