# SPDX-License-Identifier: Apache-2.0
"""The highest rate of a trace at which a real `vllm serve` keeps targets for nearly all requests, arm by arm.

    python benchmarks/goodput.py --trace azure_conv_2023.csv --speeds 1,1.5,2,2.5,3,3.5 --targets 12:1000,20:1000 \\
        --arm stock --arm "stock --max-num-batched-tokens 512" --arm 'pdmux {"itl_slo_ms": 12, "ttft_slo_ms": 1000}' \\
        --options "--max-model-len 40960 --gpu-memory-utilization 0.85" --out goodput.json

An arm is ``stock``, or ``pdmux`` and its settings as JSON, then options of `vllm serve` for it alone. Each arm is a
server of its own: one after the other, each with all rounds, or with `--at-once` all up, so that they take turns speed
by speed and what drifts meets all (their memory must fit: `--kv-cache-memory-bytes` in the options). The openai client
sends the requests of the trace, faster and faster, until fewer than half are within the loosest targets. Targets are
ITL:TTFT in ms. A request is within them if its first token came in time and its mean time per output token (`tpot`), or
the 95th percentile of its gaps (`itl_p95`), was short enough: both are said, since the conclusion may depend on it.
Goodput at 99 % is the rate of the highest speed at which 99 % of the requests of all rounds are within the targets, and
were at all lower ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import shapes
from arrivals import Request, quantile, share_within
from machine import command_line, description
from replay import chosen
from serving import Clients, model, server_arguments, serving

KINDS = {"tpot": "tpot_ms", "itl_p95": "itl_p95_ms"}
ATTAINED = (0.95, 0.99)
GIVE_UP = 0.5  # with fewer requests within the loosest targets no faster speed is tried
DRAIN_S = 20.0  # after the last arrival
WARM_UP = 8  # requests that each server answers before


def main() -> None:
    args = arguments()
    found: dict[str, Any] = {**description(), "command": command_line(), "arms": [], "rows": []}
    with Clients(args.clients) as clients:
        for together in [args.arm] if args.at_once else [[arm] for arm in args.arm]:
            with served(args, together) as servers:
                found["arms"] += [{"arm": arm, "ready_s": ready_s} for arm, (_, ready_s) in servers.items()]
                for row in measured(args, servers, clients):
                    found["rows"].append(row)
                    print(row, file=sys.stderr, flush=True)
                    write(args, found)
    for arm in found["arms"]:
        print(json.dumps(arm), file=sys.stderr, flush=True)


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """After each row, with the goodput of the rows so far: a run that is cut off has said what it knows."""
    for arm in found["arms"]:
        rows = [row for row in found["rows"] if row["arm"] == arm["arm"]]
        traces = dict.fromkeys(row["trace"] for row in rows)
        arm["goodput"] = {
            trace: goodput([row for row in rows if row["trace"] == trace], args.targets) for trace in traces
        }
    if args.out:
        args.out.write_text(json.dumps(found) + "\n")


@contextlib.contextmanager
def served(args: argparse.Namespace, arms: list[str]) -> Iterator[dict[str, tuple[str, float]]]:
    """(address, seconds until it was ready) of a server for each arm; they start together."""
    folder, logs = model(args.shape), Path(tempfile.mkdtemp(prefix="goodput-"))
    with contextlib.ExitStack() as stack:
        contexts = [
            serving(folder, [*shlex.split(args.options), *server_arguments(arm)], logs / f"{number}.log")
            for number, arm in enumerate(arms)
        ]
        with ThreadPoolExecutor(len(arms)) as pool:
            yield dict(zip(arms, pool.map(stack.enter_context, contexts), strict=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", required=True, help="with --speeds, once for each")
    parser.add_argument(
        "--speeds", type=numbers, action="append", required=True, help="times faster than recorded, with commas"
    )
    parser.add_argument("--skip", type=float, default=0.0, help="seconds of the trace that are left out")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals at each speed")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of a request; longer ones are left out")
    parser.add_argument("--targets", default="12:1000,20:1000", help="ITL:TTFT in ms, with commas")
    parser.add_argument("--arm", action="append", required=True, help="'stock [OPTIONS]' or 'pdmux JSON [OPTIONS]'")
    parser.add_argument("--options", default="", help="of `vllm serve` for all arms")
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--at-once", action="store_true", help="all servers are up and take turns")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="processes that send requests and read tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.trace) != len(args.speeds):
        parser.error(f"--trace is given {len(args.trace)} times and --speeds {len(args.speeds)}: one for each trace")
    try:
        for arm in args.arm:
            server_arguments(arm)
    except ValueError as error:
        parser.error(str(error))
    args.targets = [(itl, ttft) for itl, ttft in (map(float, pair.split(":")) for pair in args.targets.split(","))]
    return args


def numbers(text: str) -> list[float]:
    return sorted(map(float, text.split(",")))


def measured(
    args: argparse.Namespace, servers: dict[str, tuple[str, float]], clients: Clients
) -> Iterator[dict[str, Any]]:
    """A row for each trace, round, speed and arm, the arms taking turns."""
    vocabulary = shapes.vocabulary(args.shape)
    for path, speeds in zip(args.trace, args.speeds, strict=True):
        first = requests_of(args, path, speeds[0])[:WARM_UP]
        for address, _ in servers.values():  # one after the other: none shares the GPU with another
            clients.serve(address, [replace(one, at_ms=0.0) for one in first], vocabulary, DRAIN_S, "warm-up")
        given_up: dict[str, float] = {}  # the speed from which on an arm is left out
        for number in range(args.rounds):
            for speed in speeds:
                requests = requests_of(args, path, speed)
                for arm, (address, _) in servers.items():
                    if speed >= given_up.get(arm, math.inf):
                        continue
                    salt = f"{number} {speed:g}"
                    seen = clients.serve(address, requests, vocabulary, args.seconds + DRAIN_S, salt)
                    rate = {"speed": speed, "requests_per_s": len(requests) / args.seconds}
                    found = {"trace": path.name, "round": number, "arm": arm, **rate, **row(seen, args)}
                    yield found
                    if max(shares["tpot"] for shares in found["within"].values()) < GIVE_UP:
                        given_up[arm] = math.nextafter(speed, math.inf)


def requests_of(args: argparse.Namespace, path: Path, speed: float) -> list[Request]:
    arrivals = chosen(path, speed, args.skip, args.seconds, args.longest)
    return [Request(one.at_ms, one.prompt_tokens, one.answer_tokens, list(one.blocks)) for one in arrivals]


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
    """Of one arm and trace, by targets, what is meant of ITL, and the share: requests per second; 0 where the slowest
    is too fast."""
    found: dict[str, Any] = {}
    for itl, ttft in targets:
        name = f"{itl:g}:{ttft:g}"
        found[name] = {kind: {f"{share:g}": knee(rows, name, kind, share) for share in ATTAINED} for kind in KINDS}
    return found


def knee(rows: list[dict[str, Any]], targets: str, kind: str, share: float) -> float:
    best = 0.0
    for rate in sorted({one["requests_per_s"] for one in rows}):
        reached = [one["within"][targets][kind] for one in rows if one["requests_per_s"] == rate]
        if statistics.mean(reached) < share:  # all rounds have the same requests
            break
        best = rate
    return best


if __name__ == "__main__":
    main()
