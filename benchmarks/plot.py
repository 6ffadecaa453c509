# SPDX-License-Identifier: Apache-2.0
"""Draws ITL against prefill throughput, stock vLLM beside the plugin, from files that `frontier.py` has written.

    python benchmarks/plot.py benchmarks/results/frontier-h200-*.json --out docs/frontier-h200.svg

One panel for each cell. A point is the median of the rounds at ITL p50; the line to its right ends at ITL p99. Stock's
points are its chunk sizes, the plugin's its divisions, by the SMs of prefill. The same files give the same picture.
Needs matplotlib (`pip install "vllm-pdmux[test]"`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from compare import latest, prefill_rate

matplotlib.use("Agg")
from matplotlib import pyplot

# Of Okabe and Ito: told apart by colour-blind readers too, and by their marks in grey.
ARMS = {
    "stock": ("#555555", "s", "stock, by chunk"),
    "capped": ("#0072B2", "o", "capped, by SMs of prefill"),
    "disjoint": ("#D55E00", "^", "disjoint, by SMs of prefill"),
}
NAMES_AT = {"stock": (4, -9, "left"), "capped": (1, -11, "center"), "disjoint": (-4, 5, "right")}  # in points
COLUMNS, PANEL_INCHES = 2, (5.0, 3.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help=".svg or .png")
    args = parser.parse_args()
    results = [json.loads(file.read_text()) for file in args.files]
    draw(latest(results), title(results[-1]), args.out)


def title(result: dict[str, Any]) -> str:
    versions = result["versions"]
    return f"{result['machine']['gpu']}, Llama-3.1-8B shape in bf16, vLLM {versions['vllm']}, torch {versions['torch']}"


def draw(rows: list[dict[str, Any]], text: str, out: Path) -> None:
    """Write the picture of all cells."""
    cells = sorted({row["cell"] for row in rows}, key=lambda cell: tuple(map(int, cell.split(":"))))
    lines = -(-len(cells) // COLUMNS)
    width, height = PANEL_INCHES
    matplotlib.rcParams |= {"svg.hashsalt": "vllm-pdmux", "svg.fonttype": "none"}  # the same ids each time, and text
    figure, axes = pyplot.subplots(lines, COLUMNS, figsize=(width * COLUMNS, height * lines), squeeze=False)
    for axis, cell in zip(axes.flat, cells, strict=False):
        panel(axis, cell, [row for row in rows if row["cell"] == cell])
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    axes.flat[0].legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(text, fontsize=10)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None, "Creator": None} if out.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def panel(axis: Any, cell: str, rows: list[dict[str, Any]]) -> None:
    """One cell."""
    batch, context, tokens = map(int, cell.split(":"))
    found = {arm: points(arm, rows) for arm in ARMS}
    limit_ms = 1.15 * max(x for arm in ("capped", "disjoint") for x, *_ in found[arm])  # stock's largest chunks are far
    for arm, (colour, mark, label) in ARMS.items():
        mine = sorted(one for one in found[arm] if one[0] <= limit_ms)
        if not mine:
            continue
        xs, ys = [x for x, *_ in mine], [y for _, _, y, _ in mine]
        axis.plot(xs, ys, color=colour, marker=mark, markersize=5, linewidth=1.2, label=label, zorder=3)
        axis.hlines(ys, xs, [min(p99, limit_ms) for _, p99, _, _ in mine], color=colour, linewidth=0.8, alpha=0.6)
        for x, _, y, name in mine:
            *offset, side = NAMES_AT[arm]
            axis.annotate(name, (x, y), offset, textcoords="offset points", fontsize=7, color=colour, ha=side)
    alone = sorted(row["itl_alone_ms"]["median"] for row in rows)
    alone_ms = alone[len(alone) // 2]
    axis.axvline(alone_ms, color="#999999", linestyle=":", linewidth=1)
    axis.annotate(
        "decode alone", (alone_ms, 0.98), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=7, color="#777777", va="top", rotation=90,
    )  # fmt: skip
    axis.set_xlim(0.9 * alone_ms, limit_ms)
    axis.set_ylim(0, 1.12 * axis.get_ylim()[1])
    axis.set_title(f"{batch} requests decode at {context:,} tokens, prompts of {tokens:,}", fontsize=9)
    axis.set_xlabel("ITL p50 (line: to p99), ms", fontsize=8)
    axis.set_ylabel("prefill, thousand tokens/s", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def points(arm: str, rows: list[dict[str, Any]]) -> list[tuple[float, float, float, str]]:
    """(ITL p50, ITL p99, thousand prefill tokens/s, the setting's name) of stock or of one kind of division."""
    found = []
    for row in rows:
        setting = str(row["setting"])
        kind, _, sms = setting.partition(":")
        if row["arm"] == "stock" if arm == "stock" else row["arm"] == "pdmux" and kind == arm:
            p50, p99 = (row[name]["median"] for name in ("itl_p50_ms", "itl_p99_ms"))
            found.append((p50, p99, prefill_rate(row) / 1e3, sms or setting))
    return found


if __name__ == "__main__":
    main()
