# SPDX-License-Identifier: Apache-2.0
"""A profile of a device for the simulator, from files that `frontier.py` has written; with its errors against them.

    python benchmarks/device_profile.py benchmarks/results/frontier-h200-*.json --out profile.json

What is fitted: decode alone by least squares over the cells; a fused step over stock's chunks; for each group the
slowdown of decode and the pace of prefill, each the mean over the cells. What is not: how the time of a prompt divides
between its tokens and the pairs of attention, which is taken from the arithmetic of the pairs at `--attention-tflops`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import shapes
from machine import command_line

PROMPT_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--attention-tflops", type=float, default=600.0, help="sustained by attention in a prompt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [json.loads(file.read_text()) for file in args.files]
    rows = [row for result in results for row in result["summary"] if "@" not in row["arm"]]
    alone_ms = statistics.median(
        value["prefill_alone_ttft_ms"]
        for result in results
        for arm in result["arms"].values()
        for name, value in arm.items()
        if name == f"prefill_alone_{PROMPT_TOKENS}"
    )
    kv_tokens = max(arm["kv_tokens"] for result in results for arm in result["arms"].values())
    profile = fit(rows, alone_ms, pair_ms(args.shape, args.attention_tflops), args.total_sms)
    machine = {name: results[0][name] for name in ("machine", "versions", "python")}
    found = {"name": f"{machine['machine']['gpu']}, {args.shape}", **machine, "command": command_line()}
    found |= {**profile, "kv_tokens": kv_tokens, "errors": errors(profile, rows)}
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def pair_ms(shape: str, tflops: float) -> float:
    """Of attention: a new token and one before it, over all layers. 4 operations for each of the heads' sizes."""
    config = shapes.CONFIGS[shape]
    operations = 4 * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    return operations / (tflops * 1e12) * 1e3


def fit(rows: list[dict[str, Any]], alone_ms: float, pair: float, total_sms: int) -> dict[str, Any]:
    """The numbers of a profile."""
    cells = {row["cell"] for row in rows}
    points = [(*size(cell), middle(row for row in rows if row["cell"] == cell)) for cell in cells]
    fixed, per_request, per_token = least_squares([(1.0, batch, tokens) for batch, tokens, _ in points], points)
    pairs = PROMPT_TOKENS * PROMPT_TOKENS / 2
    profile: dict[str, Any] = {
        "decode_fixed_ms": fixed,
        "decode_ms_per_request": per_request,
        "decode_ms_per_context_token": per_token,
        "prefill_fixed_ms": 0.0,
        "prefill_ms_per_token": (alone_ms - pair * pairs) / PROMPT_TOKENS,
        "prefill_ms_per_token_pair": pair,
    }
    stock = [row for row in rows if row["arm"] == "stock"]
    floors, shares = [1 + i / 20 for i in range(21)], [i / 20 for i in range(31)]
    profile["fused_floor"], profile["fused_decode"] = min(
        product(floors, shares),
        key=lambda pick: sum(abs(error) for error in fused_errors({**profile, **named(pick)}, stock)),
    )
    profile["groups"] = []
    for setting in dict.fromkeys(row["setting"] for row in rows if row["arm"] == "pdmux"):
        same = [row for row in rows if row["setting"] == setting]
        sharing, _, sms = setting.partition(":")
        slowdowns = [row["itl_p50_ms"]["median"] / row["itl_alone_ms"]["median"] for row in same]
        paces = [row["prefill_tokens_per_s"]["median"] / (PROMPT_TOKENS / alone_ms * 1e3) for row in same]
        split = {"sharing": sharing, "prefill_sms": int(sms), "decode_sms": total_sms - int(sms)}
        means = {"slowdown": statistics.mean(slowdowns), "pace": statistics.mean(paces)}
        profile["groups"].append({**split, **means})
    return profile


def named(pick: tuple[float, float]) -> dict[str, float]:
    return {"fused_floor": pick[0], "fused_decode": pick[1]}


def fused_errors(profile: dict[str, Any], stock: list[dict[str, Any]]) -> list[float]:
    """Of the ITL p50 of each chunk size, relative."""
    found = []
    for row in stock:
        alone_ms, chunk = row["itl_alone_ms"]["median"], row["setting"] - size(row["cell"])[0]
        pairs = chunk * PROMPT_TOKENS / 2  # in the middle of a prompt
        prefill_ms = profile["prefill_ms_per_token"] * chunk + profile["prefill_ms_per_token_pair"] * pairs
        expected = max(profile["fused_floor"] * alone_ms, profile["fused_decode"] * alone_ms + prefill_ms)
        found.append(expected / row["itl_p50_ms"]["median"] - 1)
    return found


def errors(profile: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Relative errors over the runs that the profile was fitted to: median and largest of their sizes."""
    groups = {f"{group['sharing']}:{group['prefill_sms']}": group for group in profile["groups"]}
    mine = [(groups[row["setting"]], row) for row in rows if row["arm"] == "pdmux"]
    full = PROMPT_TOKENS / prompt_ms(profile) * 1e3
    found = {
        "decode alone": [decode_ms(profile, row["cell"]) / row["itl_alone_ms"]["median"] - 1 for row in rows],
        "decode beside prefill": [
            decode_ms(profile, row["cell"]) * group["slowdown"] / row["itl_p50_ms"]["median"] - 1 for group, row in mine
        ],
        "prefill beside decode": [
            full * group["pace"] / row["prefill_tokens_per_s"]["median"] - 1 for group, row in mine
        ],
        "fused step": fused_errors(profile, [row for row in rows if row["arm"] == "stock"]),
    }
    return {what: {"median": middle_of(values), "max": max(map(abs, values))} for what, values in found.items()}


def prompt_ms(profile: dict[str, Any]) -> float:
    pairs = PROMPT_TOKENS * PROMPT_TOKENS / 2
    return profile["prefill_ms_per_token"] * PROMPT_TOKENS + profile["prefill_ms_per_token_pair"] * pairs


def decode_ms(profile: dict[str, Any], cell: str) -> float:
    batch, tokens = size(cell)
    context_ms = profile["decode_ms_per_context_token"] * tokens
    return profile["decode_fixed_ms"] + profile["decode_ms_per_request"] * batch + context_ms


def size(cell: str) -> tuple[int, int]:
    """Decoding requests, and the tokens of their contexts together."""
    batch, context, _ = map(int, cell.split(":"))
    return batch, batch * context


def middle(rows: Any) -> float:
    return statistics.median(row["itl_alone_ms"]["median"] for row in rows)


def middle_of(values: list[float]) -> float:
    return statistics.median(map(abs, values))


def least_squares(columns: list[tuple[float, ...]], points: list[tuple[float, ...]]) -> list[float]:
    import numpy

    weights = numpy.array([1 / point[-1] for point in points])  # relative errors
    matrix = numpy.array(columns, dtype=float) * weights[:, None]
    return numpy.linalg.lstsq(matrix, numpy.array([point[-1] for point in points]) * weights, rcond=None)[0].tolist()


if __name__ == "__main__":
    main()
