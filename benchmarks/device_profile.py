# SPDX-License-Identifier: Apache-2.0
"""A profile of a device for the simulator, from files that `frontier.py` has written; with its errors against them.

    python benchmarks/device_profile.py benchmarks/results/frontier-h200-*.json --out profile.json

What is fitted (`vllm_pdmux.calibration.fit`, as by `vllm-pdmux calibrate`): decode alone over the cells, a fused step
over stock's chunks, for each group the slowdown of decode and the pace of prefill. What is not: how the time of a
prompt divides between its tokens and the pairs of attention, which is taken from the arithmetic of the pairs at
`--attention-tflops`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shapes
from compare import latest, prefill_rate
from machine import command_line

from vllm_pdmux.calibration.fit import errors, fit
from vllm_pdmux.calibration.samples import (
    BesideSample,
    DecodeSample,
    Division,
    FusedSample,
    PrefillSample,
    Samples,
)

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
    kv_tokens = max(arm["kv_tokens"] for result in results for arm in result["arms"].values())
    measured = samples(results, kv_tokens, args.total_sms)
    profile = fit(measured, f"{results[0]['machine']['gpu']}, {args.shape}", pair_ms(args.shape, args.attention_tflops))
    machine = {name: results[0][name] for name in ("machine", "versions", "python")}
    found = {"name": profile.name, **machine, "command": command_line(), **profile.model_dump()}
    found["errors"] = {kind: asdict(error) for kind, error in errors(profile, measured).items()}
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def pair_ms(shape: str, tflops: float) -> float:
    """Of attention: a new token and one before it, over all layers. 4 operations for each of the heads' sizes."""
    config = shapes.CONFIGS[shape]
    operations = 4 * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    return operations / (tflops * 1e12) * 1e3


def samples(results: list[dict[str, Any]], kv_tokens: int, total_sms: int) -> Samples:
    """What the runs have measured, with stock and with the divisions of the backend that is not named."""
    rows = [row for row in latest(results) if "@" not in row["arm"] and not str(row["setting"]).startswith("slo")]
    alone_ms = statistics.median(
        value["prefill_alone_ttft_ms"]
        for result in results
        for arm in result["arms"].values()
        for name, value in arm.items()
        if name == f"prefill_alone_{PROMPT_TOKENS}"
    )
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    settings = list(dict.fromkeys(row["setting"] for row in rows if row["arm"] == "pdmux"))
    alone = {cell: middle(row for row in rows if row["cell"] == cell) for cell in cells}
    return Samples(
        decode=tuple(DecodeSample(*size(cell), alone[cell]) for cell in cells),
        prefill=(PrefillSample(PROMPT_TOKENS, 0, alone_ms),),
        beside=tuple(
            BesideSample(
                settings.index(row["setting"]) + 1,
                cells.index(row["cell"]),
                *size(row["cell"]),
                PROMPT_TOKENS,
                row["itl_p50_ms"]["median"],
                prefill_rate(row),
                row["itl_alone_ms"]["median"],
            )
            for row in rows
            if row["arm"] == "pdmux"
        ),
        fused=tuple(fused(row) for row in rows if row["arm"] == "stock"),
        divisions=tuple(
            Division(sharing, int(sms), total_sms - int(sms))
            for sharing, sms in (setting.split(":") for setting in settings)
        ),
        kv_tokens=kv_tokens,
    )


def fused(row: dict[str, Any]) -> FusedSample:
    """A stock step of this chunk size, in the middle of a prompt."""
    batch, context_tokens = size(row["cell"])
    chunk = row["setting"] - batch
    times = row["itl_p50_ms"]["median"], row["itl_alone_ms"]["median"]
    return FusedSample(batch, context_tokens, chunk, (PROMPT_TOKENS - chunk) // 2, *times)


def size(cell: str) -> tuple[int, int]:
    """Decoding requests, and the tokens of their contexts together."""
    batch, context, _ = map(int, cell.split(":"))
    return batch, batch * context


def middle(rows: Any) -> float:
    return statistics.median(row["itl_alone_ms"]["median"] for row in rows)


if __name__ == "__main__":
    main()
