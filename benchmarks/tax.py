# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs where it has nothing to gain: stock vLLM and the plugin in turns, on one GPU.

    python benchmarks/tax.py --decode 32:2048,128:2048 --prompt 8192 --group capped:84 --kv-gib 44 --out tax.json

Decode with nothing to prefill (ITL, CPU time of a step), a prompt with nothing decoding (TTFT), and a load so low that
requests hardly meet (TTFT and ITL); and how long each engine took to start. Without `--kv-gib` one engine is up at a
time and takes what memory it may, which gives the KV capacity of each. Prints the medians of the rounds, and those of
the plugin over stock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import shapes
from arrivals import quantile
from frontier import Process
from machine import command_line, spread

LIMIT_S = 120.0  # of the low load


def main() -> None:
    args = arguments()
    found: dict[str, Any] = {"command": command_line(), "arms": {}, "rows": []}
    for together in [["stock", "pdmux"]] if args.kv_gib else [["stock"], ["pdmux"]]:
        engines = {arm: Process(arm, args) for arm in together}
        for arm, engine in engines.items():
            ready = engine.answer()  # none starts while another measures
            found |= {name: ready.pop(name) for name in ("machine", "versions", "python")}
            found["arms"][arm] = {name: ready[name] for name in ("ready_s", "kv_tokens")}
        for number in range(args.rounds):
            for arm, engine in engines.items():
                for row in measured(args, engine, None if arm == "stock" else args.groups):
                    found["rows"].append({"arm": arm, "round": number, **row})
                    print(found["rows"][-1], file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.close()
    found["summary"] = summary(found["rows"])
    for line in found["summary"]:
        print(json.dumps(line))
    print(json.dumps(found["arms"]))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decode", default="32:2048,128:2048", help="requests and the context of each, with commas")
    parser.add_argument("--steps", type=int, default=300, help="of decode")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt alone")
    parser.add_argument("--low", default="2:10:1024:64", help="requests per second: requests: prompt: answer tokens")
    parser.add_argument("--group", dest="groups", default="capped:84", help="of the plugin")
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, help="KV cache of each engine, for both to be up at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.max_prefill_tokens = None  # of frontier's engines
    return args


def measured(args: argparse.Namespace, engine: Process, setting: str | None) -> list[dict[str, Any]]:
    """One round on one engine; what each load gave."""
    rows = []
    for load in args.decode.split(","):
        order = {"decode": load, "setting": setting, "steps": args.steps}
        rows.append({"load": f"decode {load}", **engine.ask(order)})
    alone_ms = engine.ask({"alone": args.prompt})["prefill_alone_ttft_ms"]
    rows.append({"load": f"prompt {args.prompt}", "ttft_p50_ms": alone_ms})
    per_s, count, prompt, answer = map(float, args.low.split(":"))
    arrivals = [[number / per_s * 1e3, int(prompt), int(answer), []] for number in range(int(count))]
    served = engine.ask({"replay": arrivals, "setting": setting, "limit_s": LIMIT_S})
    ttft_ms = [one for one in served["seen"]["ttft_ms"] if one is not None]
    seen = {"ttft_p50_ms": quantile(ttft_ms, 0.5), "itl_p50_ms": served["itl_p50_ms"], "answered": len(ttft_ms)}
    return [*rows, {"load": f"low {args.low}", **seen}]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load and time: the spread of both arms over the rounds, and the plugin's median over stock's."""
    lines = []
    for load in dict.fromkeys(row["load"] for row in rows):
        same = [row for row in rows if row["load"] == load]
        for name in [name for name in same[0] if name.endswith(("_ms", "_step"))]:
            arms = {arm: [row[name] for row in same if row["arm"] == arm] for arm in ("stock", "pdmux")}
            times = statistics.median(arms["pdmux"]) / statistics.median(arms["stock"])
            lines.append({"load": load, "what": name, **{a: spread(v) for a, v in arms.items()}, "times_stock": times})
    return lines


if __name__ == "__main__":
    main()
