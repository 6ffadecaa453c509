# SPDX-License-Identifier: Apache-2.0
"""What the simulator says of arms that `replay.py` has served, beside what was measured.

    python benchmarks/predict.py benchmarks/results/replay-h200.json --traces FOLDER \\
        --profile benchmarks/results/profile-h200-llama-8b.json --out prediction.json

For stock and for each division that the profile has: TTFT and ITL, p50 and p99, predicted over measured (the median of
the rounds), and the median and largest error of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from arrivals import quantile
from machine import command_line
from replay import chosen, predicted

from vllm_pdmux.simulator.profile import read_profile

VALUES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces that were replayed")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--longest", type=int, default=32768, help="of the replay")
    parser.add_argument("--seconds", type=float, default=9.0, help="of the replay")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    served = json.loads(args.file.read_text())
    profile = read_profile(args.profile)
    rows = []
    for load in dict.fromkeys((row["trace"], row["speed"], row["skip_s"]) for row in served["rows"]):
        name, speed, skip_s = load
        arrivals = chosen(args.traces / name, speed, skip_s, args.seconds, args.longest)
        same = [row for row in served["rows"] if (row["trace"], row["speed"], row["skip_s"]) == load]
        for setting in dict.fromkeys(row["setting"] for row in same if not str(row["setting"]).startswith("slo")):
            rounds = [measured(row) for row in same if row["setting"] == setting]
            found = {value: statistics.median(one[value] for one in rounds) for value in VALUES}
            if said := predicted(profile, arrivals, setting, [(1e9, 1e9)]):
                ratios = {value: said[value] / found[value] for value in VALUES}
                rows.append({"trace": name, "setting": setting, "measured": found, "predicted_over_measured": ratios})
    errors = {}
    for value in VALUES:
        off = [abs(row["predicted_over_measured"][value] - 1) for row in rows]
        errors[value] = {"median": statistics.median(off), "max": max(off)}
    machine = {name: served[name] for name in ("machine", "versions", "python")}
    text = json.dumps({**machine, "command": command_line(), "errors": errors, "rows": rows}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measured(row: dict[str, Any]) -> dict[str, float]:
    """Of one run."""
    ttft = [one for one in row["seen"]["ttft_ms"] if one is not None]
    times = {"ttft_p50_ms": statistics.median(ttft), "ttft_p99_ms": quantile(ttft, 0.99)}
    return times | {name: row[name] for name in ("itl_p50_ms", "itl_p99_ms")}


if __name__ == "__main__":
    main()
