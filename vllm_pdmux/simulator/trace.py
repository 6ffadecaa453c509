# SPDX-License-Identifier: Apache-2.0
"""Arrivals of requests: from the traces that are in use, or steady."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from typing import TextIO

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

    `speed`: how many times faster they arrive. Times count from the first request. A Mooncake trace has times in steps
    of seconds: the requests of one step arrive evenly until the next one. Raises TraceError.
    """
    read = _azure if path.endswith(".csv") else _mooncake
    number = 0
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            found = []
            for number, arrival in enumerate(islice(read(file), limit), start=1):  # noqa: B007 - an error names it
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
    if read is _mooncake:
        found = _spread(found)
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


def _spread(arrivals: list[Arrival]) -> list[Arrival]:
    """Those of one time evenly from there to the next time; the last ones over a step as long as the one before."""
    steps = [list(same) for _, same in groupby(arrivals, key=lambda one: one.at_ms)]
    starts_ms = [step[0].at_ms for step in steps]
    ends_ms = [*starts_ms[1:], 2 * starts_ms[-1] - starts_ms[-2] if len(steps) > 1 else starts_ms[-1]]
    return [
        replace(one, at_ms=start_ms + (end_ms - start_ms) * place / len(step))
        for step, start_ms, end_ms in zip(steps, starts_ms, ends_ms, strict=True)
        for place, one in enumerate(step)
    ]


def _azure(file: TextIO) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # Seven digits of a second; Python reads six.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield Arrival(moment.timestamp() * 1e3, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(file: TextIO) -> Iterator[Arrival]:
    for line in file:
        row = json.loads(line)
        blocks = tuple(row.get("hash_ids", ()))
        yield Arrival(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), blocks)
