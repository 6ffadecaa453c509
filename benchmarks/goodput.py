# SPDX-License-Identifier: Apache-2.0
"""The highest rate of a trace at which a real `vllm serve` keeps targets for nearly all requests, arm by arm.

    python benchmarks/goodput.py --trace azure_conv_2023.csv --speeds 1,1.5,2,2.5,3,3.5 --targets 12:1000,20:1000 \\
        --arm stock --arm "stock --max-num-batched-tokens 512" --arm 'pdmux {"itl_slo_ms": 12, "ttft_slo_ms": 1000}' \\
        --options "--max-model-len 40960 --gpu-memory-utilization 0.85" --out goodput.json

An arm is ``stock``, or ``pdmux`` and its settings as JSON, then options of `vllm serve` for it alone. Each arm is a
server of its own; the openai client sends the requests of the trace, faster and faster, until fewer than half are
within the loosest targets. Targets are ITL:TTFT in ms. A request is within them if its first token came in time and its
mean time per output token (`tpot`), or the 95th percentile of its gaps (`itl_p95`), was short enough: both are said,
since the conclusion may depend on it. Goodput at 99 % is the rate of the highest speed at which 99 % of the requests
are within the targets, and were at all lower ones.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import shapes
from arrivals import Request, quantile, share_within
from machine import command_line, description
from replay import chosen
from serving import model, serve, server_arguments, serving

KINDS = {"tpot": "tpot_ms", "itl_p95": "itl_p95_ms"}
ATTAINED = (0.95, 0.99)
GIVE_UP = 0.5  # with fewer requests within the loosest targets no faster speed is tried
DRAIN_S = 20.0  # after the last arrival
WARM_UP = 8  # requests that each server answers before


def main() -> None:
    args = arguments()
    folder, logs = model(args.shape), Path(tempfile.mkdtemp(prefix="goodput-"))
    found: dict[str, Any] = {**description(), "command": command_line(), "arms": [], "rows": []}
    for number, arm in enumerate(args.arm):
        options = [*shlex.split(args.options), *server_arguments(arm)]
        with serving(folder, options, logs / f"{number}.log") as (address, ready_s):
            rows = measure(args, arm, address)
        found["rows"] += rows
        found["arms"].append({"arm": arm, "ready_s": ready_s, "goodput": goodput(rows, args.targets)})
        print(json.dumps(found["arms"][-1]), file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(found) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--speeds", type=numbers, required=True, help="times faster than recorded, with commas")
    parser.add_argument("--skip", type=float, default=0.0, help="seconds of the trace that are left out")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals at each speed")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of a request; longer ones are left out")
    parser.add_argument("--targets", default="12:1000,20:1000", help="ITL:TTFT in ms, with commas")
    parser.add_argument("--arm", action="append", required=True, help="'stock [OPTIONS]' or 'pdmux JSON [OPTIONS]'")
    parser.add_argument("--options", default="", help="of `vllm serve` for all arms")
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        for arm in args.arm:
            server_arguments(arm)
    except ValueError as error:
        parser.error(str(error))
    args.targets = [(itl, ttft) for itl, ttft in (map(float, pair.split(":")) for pair in args.targets.split(","))]
    return args


def numbers(text: str) -> list[float]:
    return sorted(map(float, text.split(",")))


def measure(args: argparse.Namespace, arm: str, address: str) -> list[dict[str, Any]]:
    """One arm: a row for each speed."""
    rows: list[dict[str, Any]] = []
    vocabulary = shapes.vocabulary(args.shape)
    for speed in args.speeds:
        arrivals = chosen(args.trace, speed, args.skip, args.seconds, args.longest)
        requests = [Request(one.at_ms, one.prompt_tokens, one.answer_tokens, list(one.blocks)) for one in arrivals]
        if not rows:
            serve(address, [replace(one, at_ms=0.0) for one in requests[:WARM_UP]], vocabulary, DRAIN_S, "warm-up")
        served = serve(address, requests, vocabulary, args.seconds + DRAIN_S, f"{speed:g}")
        rows.append({"arm": arm, "speed": speed, "requests_per_s": len(requests) / args.seconds, **row(served, args)})
        print({k: v for k, v in rows[-1].items() if k != "seen"}, file=sys.stderr, flush=True)
        if max(shares["tpot"] for shares in rows[-1]["within"].values()) < GIVE_UP:
            break
    return rows


def row(served: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What is kept of one speed: TTFT beside ITL, and the shares within each pair of targets."""
    ttft = [one for one in served["seen"]["ttft_ms"] if one is not None]
    within = {
        f"{itl:g}:{ttft_slo:g}": {
            kind: share_within(served["seen"], ttft_slo, itl, name) for kind, name in KINDS.items()
        }
        for itl, ttft_slo in args.targets
    }
    times = {f"ttft_p{share}_ms": quantile(ttft, share / 100) for share in (50, 95, 99)}
    times |= {name: served[name] for name in ("itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "itl_max_ms")}
    return {**times, "within": within, "answered": len(ttft), "errors": served["errors"], "took_s": served["took_s"]}


def goodput(rows: list[dict[str, Any]], targets: list[tuple[float, float]]) -> dict[str, Any]:
    """By targets, what is meant of ITL, and the share: requests per second; 0 where the slowest is too fast."""
    found: dict[str, Any] = {}
    for itl, ttft in targets:
        name = f"{itl:g}:{ttft:g}"
        found[name] = {kind: {f"{share:g}": knee(rows, name, kind, share) for share in ATTAINED} for kind in KINDS}
    return found


def knee(rows: list[dict[str, Any]], targets: str, kind: str, share: float) -> float:
    best = 0.0
    for one in rows:  # from slow to fast
        if one["within"][targets][kind] < share:
            break
        best = one["requests_per_s"]
    return best


if __name__ == "__main__":
    main()
