# SPDX-License-Identifier: Apache-2.0
"""How busy each stream of the GPU is, from torch's profiler: whether a lane waits, and which of its kernels are slow.

python benchmarks/streams.py --cells 64:8192:8192 --groups capped:100,disjoint:68 --kv-gib 44 --out streams.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

LONG_GAP_US = 50.0
MOST_KERNELS = 6  # of each stream that are listed
FEWEST_KERNELS = 20  # of a stream that is listed


def stream_use(profiled: Any) -> list[dict[str, Any]]:
    """By stream, the busiest first: its share of the time with a kernel on it, how long it had none for, and the
    kernels with the most time (their number, the median of each in µs, ms of all)."""
    kernels = defaultdict(list)
    for event in profiled.profiler.kineto_results.events():
        is_kernel = "CUDA" in str(event.device_type()) and not event.name().startswith(("Mem", "Event", "Stream"))
        if is_kernel and event.duration_ns() > 0:
            kernels[event.device_resource_id()].append(
                (event.start_ns() / 1e3, event.duration_ns() / 1e3, event.name())
            )
    found = [one_stream(stream, sorted(spans)) for stream, spans in kernels.items() if len(spans) >= FEWEST_KERNELS]
    return sorted(found, key=lambda one: -one["busy_ms"])


def one_stream(stream: int, spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """`spans`: when each kernel began, how long it took (both in µs) and its name, in order."""
    gaps_us, by_name, end = [], defaultdict(list), spans[0][0]
    for start, took, name in spans:
        if start > end:
            gaps_us.append(start - end)
        end = max(end, start + took)
        by_name[name[:60]].append(took)
    span_us = end - spans[0][0]
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
    long = [gap for gap in gaps_us if gap > LONG_GAP_US]
    return {
        "stream": stream,
        "span_ms": span_us / 1e3,
        "busy_ms": (span_us - sum(gaps_us)) / 1e3,
        "busy_share": 1 - sum(gaps_us) / span_us,
        "kernels": len(spans),
        "short_gaps_ms": (sum(gaps_us) - sum(long)) / 1e3,
        "long_gaps": len(long),
        "long_gaps_ms": sum(long) / 1e3,
        "most": [
            {"kernel": name, "count": len(times), "median_us": sorted(times)[len(times) // 2], "ms": sum(times) / 1e3}
            for name, times in most
        ],
    }


def main() -> None:
    from frontier import Process
    from machine import command_line

    args = arguments()
    engine = Process("pdmux", args)
    ready = engine.answer()
    found = {name: ready[name] for name in ("machine", "versions", "python")} | {"command": command_line()}
    found["rows"] = measure(args, engine)
    engine.close()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(args: argparse.Namespace, engine: Any) -> list[dict[str, Any]]:
    """All cells and groups, on an engine that is up."""
    orders = [(cell, group) for cell in args.cells.split(",") for group in args.groups.split(",")]
    return [{"cell": cell, "group": group, **engine.ask({"streams": cell, "setting": group})} for cell, group in orders]


def arguments() -> argparse.Namespace:
    from shapes import CONFIGS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="64:8192:8192")
    parser.add_argument("--groups", default="capped:100,disjoint:68")
    parser.add_argument("--shape", default="llama-8b", choices=CONFIGS)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
