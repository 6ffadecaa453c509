# SPDX-License-Identifier: Apache-2.0
"""The plugin against stock vLLM at the same ITL, from files that `frontier.py` has written.

    python benchmarks/compare.py benchmarks/results/frontier-h200-*.json

For each setting of the plugin: its ITL, its prefill throughput, what stock reaches at the same ITL p50 and at the same
ITL p99, and the ratio. Stock's curve is a straight line between two chunk sizes that were measured, its best where they
are out of order; below the smallest ITL that stock has beside prefill there is nothing to compare with ("-"), and
beyond its largest chunk the largest is taken. Where several files have a cell, each arm is read from the last of them
that has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ITLS = ("itl_p50_ms", "itl_p99_ms")
COLUMNS = (
    "cell",
    "plugin",
    "ITL alone",
    "p50",
    "p99",
    "tokens/s",
    "stock at this p50",
    "ratio",
    "at this p99",
    "ratio",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    print_table(COLUMNS, compare(latest([json.loads(file.read_text()) for file in args.files])))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """In Markdown."""
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def latest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The summaries of several files as one; of an arm in a cell the last file's that has it."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        mine: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in result["summary"]:
            mine.setdefault((row["cell"], row["arm"]), []).append(row)
        found |= mine
    return [row for rows in found.values() for row in rows]


def compare(summary: list[dict[str, Any]]) -> list[list[str]]:
    """One row of text for each setting of the plugin."""
    rows = []
    for mine in summary:
        if mine["arm"] != "pdmux":
            continue
        stock = [one for one in summary if one["arm"] == "stock" and one["cell"] == mine["cell"]]
        rate = prefill_rate(mine)
        row = [mine["cell"], mine["setting"], *(f"{median(mine, name):.1f}" for name in ("itl_alone_ms", *ITLS))]
        row.append(f"{rate:,.0f}")
        for itl in ITLS:
            there = at(median(mine, itl), [(median(one, itl), prefill_rate(one)) for one in stock])
            row += ["-", "-"] if there is None else [f"{there:,.0f}", f"{rate / there:.2f}"]
        rows.append(row)
    return rows


def at(itl_ms: float, points: list[tuple[float, float]]) -> float | None:
    """Stock's best prefill throughput at an ITL of `itl_ms`; None where it has no chunk with an ITL so small."""
    points = sorted(points)
    best = max((rate for itl, rate in points if itl <= itl_ms), default=None)
    if best is None:
        return None
    between = [
        low[1] + (high[1] - low[1]) * (itl_ms - low[0]) / (high[0] - low[0])
        for low in points
        for high in points
        if low[0] <= itl_ms < high[0]
    ]
    return max([best, *between])


def prefill_rate(row: dict[str, Any]) -> float:
    """In tokens per second; of older files that of whole runs, which have two or three steps without prefill."""
    return median(row, "steady_tokens_per_s" if "steady_tokens_per_s" in row else "prefill_tokens_per_s")


def median(row: dict[str, Any], name: str) -> float:
    return row[name]["median"]


if __name__ == "__main__":
    main()
