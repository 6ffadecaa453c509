# SPDX-License-Identifier: Apache-2.0
"""How much each lane slows the other down in each division, from files that `frontier.py` has written.

    python benchmarks/interference.py benchmarks/results/frontier-h200-*.json

A table by division and cell: ITL beside prefill over ITL alone, and prefill throughput beside decode over that of one
prompt alone. It is what the policy `slo` learns of divisions (`vllm_pdmux/calibration/fit.py`); the last column is how
much of the GPU both together do: the sum of the two lanes' rates, each over its rate alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from compare import latest, median, prefill_rate, print_table

COLUMNS = ("division", "cell", "ITL alone, ms", "decode slower by", "prefill slower by", "both lanes' rates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    print_table(COLUMNS, interference([json.loads(file.read_text()) for file in args.files]))


def interference(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row of text for each division and cell."""
    rows = []
    for row in latest(results):
        if row["arm"] != "pdmux" or str(row["setting"]).startswith("slo"):
            continue
        tokens = int(row["cell"].split(":")[2])
        slower = median(row, "itl_p50_ms") / median(row, "itl_alone_ms")
        prefill_slower = tokens / alone_ms(results, tokens) * 1e3 / prefill_rate(row)
        times = (f"{slower:.2f}", f"{prefill_slower:.2f}", f"{1 / slower + 1 / prefill_slower:.2f}")
        rows.append([row["setting"], row["cell"], f"{median(row, 'itl_alone_ms'):.1f}", *times])
    return sorted(rows)


def alone_ms(results: list[dict[str, Any]], tokens: int) -> float:
    """TTFT of a prompt of so many tokens with nothing decoding, the median over all engines."""
    name = f"prefill_alone_{tokens}"
    arms = [arm for result in results for arm in result["arms"].values() if name in arm]
    return statistics.median(arm[name]["prefill_alone_ttft_ms"] for arm in arms)


if __name__ == "__main__":
    main()
