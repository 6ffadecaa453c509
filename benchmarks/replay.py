# SPDX-License-Identifier: Apache-2.0
"""What requests of a trace see of stock vLLM, of divisions of the SMs and of the slo policy, and what was predicted.

Each arm is an engine in a process of its own; all are up at once and take turns, one serves while the others are idle.
Requests arrive in real time, `--speed` times faster than in the trace. Prompts are random tokens; where the trace has
hashes of their blocks, equal hashes are equal tokens, so that prefixes are reused. Requests longer than `--longest`
are left out.

    python benchmarks/replay.py --trace azure_conv_2023.csv --speed 3 --seconds 20 --targets 15:500,25:1000 \\
        --stock 512,2048 --groups capped:84,disjoint:84 --kv-gib 44 --profile profile.json --out replay.json

Targets are ITL:TTFT in ms. For the arm `slo` each pair is a run of its own; the other arms run once and are counted for
each, and what the policy has learned it keeps from round to round. All engines have the same KV cache, so what the
plugin's lanes take of it is not in the result. The API server is left out (`vllm serve` adds the same to all arms).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import shapes
from arrivals import share_within
from frontier import Process
from machine import command_line

from vllm_pdmux.cli.simulate import slo
from vllm_pdmux.policy import ALL_LAYERS, FixedPolicy, LayerRule
from vllm_pdmux.simulator import Arrival, DeviceProfile, Stock, read_trace, simulate
from vllm_pdmux.simulator.profile import read_profile

DRAIN_S = 15.0  # after the last arrival
WARM_UP = 8  # requests of each trace that every engine serves before


def main() -> None:
    args = arguments()
    engines = {arm: Process(arm, args) for arm in (("stock", "pdmux") if args.stock else ("pdmux",))}
    ready = {arm: engine.answer() for arm, engine in engines.items()}  # none starts while another measures
    measure_on(args, engines, ready)
    for engine in engines.values():
        engine.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", required=True, help="with --speed, once for each")
    parser.add_argument("--speed", type=float, action="append", required=True)
    parser.add_argument("--skip", type=float, action="append", help="seconds of the trace that are left out, likewise")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of a request")
    parser.add_argument("--targets", default="15:1000", help="ITL:TTFT in ms, with commas")
    parser.add_argument("--stock", default="512,2048", help="chunk sizes (max_num_batched_tokens); empty: no stock")
    parser.add_argument("--groups", default="capped:84,capped:68,disjoint:84,disjoint:68")
    parser.add_argument("--fixed", help="those of the groups that are measured; all without it")
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--kv-gib", type=float, help="KV cache of each engine; without it all memory, for one engine")
    parser.add_argument("--profile", help="of this device and shape, to predict from; else that of --calibrate")
    parser.add_argument("--calibrate", action="store_true", help="let slo begin with a calibration")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.max_prefill_tokens = None  # of frontier's engines
    args.skip = args.skip or [0.0] * len(args.trace)
    if not len(args.trace) == len(args.speed) == len(args.skip):
        counts = f"{len(args.trace)}, {len(args.speed)} and {len(args.skip)} times"
        parser.error(f"--trace, --speed and --skip are given {counts}: give one of each for every trace")
    if args.stock and args.kv_gib is None:
        parser.error("--kv-gib is not given, and two engines would both take all memory: give it, or --stock ''")
    return args


def measure_on(args: argparse.Namespace, engines: dict[str, Process], ready: dict[str, dict[str, Any]]) -> None:
    """All traces, on engines that are up and have said `ready`."""
    targets = [tuple(map(float, pair.split(":"))) for pair in args.targets.split(",")]
    profile = read_profile(args.profile) if args.profile else None
    common = {name: ready["pdmux"][name] for name in ("machine", "versions", "python")}
    arms = {arm: {k: v for k, v in said.items() if k not in (*common, "command")} for arm, said in ready.items()}
    found: dict[str, Any] = {**common, "command": command_line(), "arms": arms, "rows": []}
    if args.calibrate:
        found["calibration"] = engines["pdmux"].ask({"calibrate": True})
        profile = profile or DeviceProfile.model_validate(found["calibration"]["profile"])
    for path, speed, skip in zip(args.trace, args.speed, args.skip, strict=True):
        arrivals = chosen(path, speed, skip, args.seconds, args.longest)
        order = [[one.at_ms, one.prompt_tokens, one.answer_tokens, list(one.blocks)] for one in arrivals]
        load = {"trace": path.name, "speed": speed, "skip_s": skip, "requests": len(arrivals)}
        for arm, setting in {arm: setting for arm, setting in reversed(settings(args, targets))}.items():
            warm_up = [
                [0.0, *one[1:]] for one in order[:WARM_UP]
            ]  # not counted, so that no arm is the one that is cold
            engines[arm].ask({"replay": warm_up, "setting": setting, "limit_s": DRAIN_S})
        load["prompt_tokens_per_s"] = round(sum(one.prompt_tokens for one in arrivals) / args.seconds)
        for number in range(args.rounds):
            for arm, setting in settings(args, targets):
                limit_s = args.seconds + DRAIN_S
                served = engines[arm].ask({"replay": order, "setting": setting, "limit_s": limit_s})
                row = {**load, "round": number, "arm": arm, "setting": setting, **served}
                row["within"] = {f"{itl:g}:{ttft:g}": within(served, itl, ttft) for itl, ttft in targets}
                if profile is not None:
                    row["predicted"] = predicted(profile, arrivals, setting, targets)
                found["rows"].append(row)
                print(line(row), file=sys.stderr, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(found) + "\n")


def settings(args: argparse.Namespace, targets: list[tuple[float, ...]]) -> list[tuple[str, Any]]:
    """The arms, with stock's between the plugin's, so that what drifts meets both."""
    mine = (args.fixed or args.groups).split(",") + [f"slo:{itl:g}:{ttft:g}" for itl, ttft in targets]
    stock = [int(chunk) for chunk in args.stock.split(",") if chunk]
    found: list[tuple[str, Any]] = []
    for place, setting in enumerate(mine):
        found += [("stock", stock[place])] if place < len(stock) else []
        found.append(("pdmux", setting))
    return found + [("stock", chunk) for chunk in stock[len(mine) :]]


def chosen(path: Path, speed: float, skip: float, seconds: float, longest: int) -> list[Arrival]:
    """The requests that arrive in `seconds`, the first `skip` seconds of the trace left out."""
    arrivals = [replace(one, at_ms=one.at_ms - skip / speed * 1e3) for one in read_trace(str(path), None, speed)]
    return [
        one for one in arrivals if 0 <= one.at_ms <= seconds * 1e3 and one.prompt_tokens + one.answer_tokens <= longest
    ]


def within(served: dict[str, Any], itl_slo_ms: float, ttft_slo_ms: float) -> dict[str, float]:
    """The share of requests within both targets, by what of their ITL is meant."""
    kinds = ("tpot_ms", "itl_p95_ms", "itl_max_ms")
    return {kind: share_within(served["seen"], ttft_slo_ms, itl_slo_ms, kind) for kind in kinds}


def predicted(
    profile: DeviceProfile, arrivals: list[Arrival], setting: Any, targets: list[tuple[float, ...]]
) -> dict[str, Any]:
    """What the simulator says."""
    labels = [f"{group.sharing}:{group.prefill_sms}" for group in profile.groups]
    found: dict[str, Any] = {"within": {}}
    for itl, ttft in targets:
        if isinstance(setting, int):
            arm: Any = Stock(setting)
        elif setting.startswith("slo"):
            arm = slo(profile, *map(float, setting.split(":")[1:]))
        elif setting in labels:
            arm = FixedPolicy(labels.index(setting) + 1, len(labels), LayerRule(layers_per_group=ALL_LAYERS))
        else:
            return {}
        result = simulate(profile, arrivals, arm, ttft_slo_ms=ttft, tpot_slo_ms=itl)
        found["within"][f"{itl:g}:{ttft:g}"] = result.met / len(arrivals)
        ttfts = sorted(result.ttft_ms)
        found |= {"ttft_p50_ms": ttfts[len(ttfts) // 2], "ttft_p99_ms": ttfts[int(0.99 * (len(ttfts) - 1))]}
        found |= {"itl_p50_ms": result.itl_ms(0.5), "itl_p99_ms": result.itl_ms(0.99)}
    return found


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    ttft = sorted(one for one in row["seen"]["ttft_ms"] if one is not None) or [float("nan")]
    shares = " ".join(f"{name}={value['tpot_ms']:.1%}" for name, value in row["within"].items())
    times = f"TTFT {ttft[len(ttft) // 2]:.0f}/{ttft[int(0.99 * (len(ttft) - 1))]:.0f}"
    itl = f"ITL {row['itl_p50_ms']:.1f}/{row['itl_p99_ms']:.1f}"
    text = f"{row['trace']} {row['arm']} {row['setting']}: {times} {itl} within {shares} took {row['took_s']:.1f}"
    if said := row.get("predicted"):
        shares = " ".join(f"{name}={value:.1%}" for name, value in said["within"].items())
        text += f" | TTFT {said['ttft_p50_ms']:.0f}/{said['ttft_p99_ms']:.0f}"
        text += f" ITL {said['itl_p50_ms']:.1f}/{said['itl_p99_ms']:.1f} {shares}"
    return text


if __name__ == "__main__":
    main()
