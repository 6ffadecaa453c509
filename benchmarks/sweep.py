# SPDX-License-Identifier: Apache-2.0
"""In simulation: how many requests of public traces meet their targets under slo, under each division, and under stock.

    python benchmarks/sweep.py --profile benchmarks/results/profile-h200-llama-8b.json --traces FOLDER --out sweep.json

For each trace, speed and pair of targets: the share of requests with TTFT and mean time per output token within them,
of slo, of the best division in hindsight and of stock's best chunk; and slo's ITL p98, which is what it keeps. No GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from machine import command_line, description

from vllm_pdmux.cli.simulate import slo
from vllm_pdmux.policy import ALL_LAYERS, FixedPolicy, LayerRule
from vllm_pdmux.simulator import Stock, read_trace, simulate
from vllm_pdmux.simulator.profile import DeviceProfile, read_profile

SPEEDS = "azure_conv_2023.csv=1.5:2.5:3.5,azure_code_2023.csv=0.7:1.0:1.4,mooncake_conversation.jsonl=0.4:0.6:0.8"
CHUNKS = (256, 512, 1024, 2048, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", required=True)
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--speeds", default=SPEEDS, help="FILE=SPEED:SPEED, with commas: times faster than recorded")
    parser.add_argument("--targets", default="12:1000,20:1000,40:2000", help="ITL:TTFT in ms, with commas")
    parser.add_argument("--requests", type=int, default=2000, help="of each trace, the first ones")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    profile = read_profile(args.profile)
    rows = []
    for name, speed in pairs(args.speeds):
        arrivals = read_trace(str(args.traces / name), args.requests, speed)
        for itl_ms, ttft_ms in (map(float, pair.split(":")) for pair in args.targets.split(",")):
            rows.append({"trace": name, "speed": speed, **case(profile, arrivals, itl_ms, ttft_ms)})
            print(rows[-1], file=sys.stderr, flush=True)
            if args.out:
                found = {**description(), "command": command_line(), "rows": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n")


def pairs(text: str) -> list[tuple[str, float]]:
    """(file, speed) of `--speeds`."""
    entries = (entry.split("=") for entry in text.split(","))
    return [(name, float(speed)) for name, speeds in entries for speed in speeds.split(":")]


def case(profile: DeviceProfile, arrivals: list[Any], itl_ms: float, ttft_ms: float) -> dict[str, Any]:
    """One load and pair of targets."""
    targets = {"ttft_slo_ms": ttft_ms, "tpot_slo_ms": itl_ms}
    splits, total = len(profile.groups), len(arrivals)
    layers = LayerRule(layers_per_group=ALL_LAYERS)
    fixed = {
        f"{group.sharing}:{group.prefill_sms}": simulate(
            profile, arrivals, FixedPolicy(number, splits, layers), **targets
        ).met
        / total
        for number, group in enumerate(profile.groups, start=1)
    }
    stock = {str(chunk): simulate(profile, arrivals, Stock(chunk), **targets).met / total for chunk in CHUNKS}
    mine = simulate(profile, arrivals, slo(profile, itl_ms, ttft_ms), **targets)
    return {
        "itl_slo_ms": itl_ms,
        "ttft_slo_ms": ttft_ms,
        "slo": mine.met / total,
        "best_division": max(fixed.values()),
        "best_chunk": max(stock.values()),
        "slo_itl_p98_ms": mine.itl_ms(0.98),
        "divisions": fixed,
        "chunks": stock,
    }


if __name__ == "__main__":
    main()
