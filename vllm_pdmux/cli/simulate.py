# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux simulate`: what stock vLLM, each division and the slo policy would make of a trace. Needs no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from vllm_pdmux.cli import CommandError
from vllm_pdmux.cli.numbers import positive
from vllm_pdmux.policy import ALL_LAYERS, DecodeAlone, FixedPolicy, LayerRule, Policy, Share, SloPolicy, Target
from vllm_pdmux.quantile import quantile
from vllm_pdmux.simulator import (
    Arrival,
    DeviceProfile,
    ProfileError,
    Result,
    Stock,
    TraceError,
    read_trace,
    simulate,
    steady,
)
from vllm_pdmux.simulator.engine import STOCK
from vllm_pdmux.simulator.profile import read_profile

NAME = "simulate"
HELP = "Predict TTFT, ITL and goodput of stock vLLM and of every policy for a trace or a rate, from a device's profile."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `simulate`."""
    parser.add_argument(
        "--profile",
        required=True,
        help="of the device and model: from calibrate --out, or benchmarks/device_profile.py",
    )
    add_load_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_load_arguments(parser: argparse._ActionsContainer) -> None:
    """Those that say what is served, under which targets, by which arms; for `plan` too."""
    parser.add_argument("--trace", help="Azure LLM inference trace (.csv) or Mooncake trace (.jsonl)")
    parser.add_argument("--speed", type=positive(float), help="of the trace: so many times as fast (default: 1)")
    parser.add_argument("--rate", type=positive(float), help="requests per second, instead of a trace")
    parser.add_argument("--prompt-tokens", type=positive(int), default=4096, help="with --rate (default: 4096)")
    parser.add_argument("--answer-tokens", type=positive(int), default=256, help="with --rate (default: 256)")
    parser.add_argument("--requests", type=positive(int), default=2000, help="at most so many (default: 2000)")
    parser.add_argument(
        "--itl-slo-ms", type=positive(float), help="target for ITL, of policy slo and of the share within targets"
    )
    parser.add_argument("--ttft-slo-ms", type=positive(float), help="target for TTFT, of both too")
    parser.add_argument(
        "--chunks",
        default="256,512,1024,2048,8192",
        help="max_num_batched_tokens of stock, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--max-prefill-tokens", type=positive(int), default=4096, help="of a batch in the lane (default: 4096)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each arm. Raises CommandError for files and options that are wrong."""
    if (args.trace is None) == (args.rate is None):
        raise CommandError("give either --trace FILE or --rate REQUESTS_PER_SECOND")
    if args.rate is not None and args.speed is not None:
        raise CommandError(f"--speed is {args.speed:g} but there is no trace: leave it out, or give --trace")
    try:
        profile = read_profile(args.profile)
        arrivals = _arrivals(args)
        _check_lengths(arrivals, profile)
    except (ProfileError, TraceError) as error:
        raise CommandError(str(error)) from error
    ttft_slo_ms, tpot_slo_ms = args.ttft_slo_ms or float("inf"), args.itl_slo_ms or float("inf")
    rows = []
    for name, arm in arms(args, profile):
        result = simulate(
            profile, arrivals, arm, args.max_prefill_tokens, ttft_slo_ms=ttft_slo_ms, tpot_slo_ms=tpot_slo_ms
        )
        has_target = args.itl_slo_ms is not None or args.ttft_slo_ms is not None
        rows.append({"arm": name, **summary(result, profile, len(arrivals), has_target)})
    if args.json:
        print(json.dumps({"profile": profile.name, "requests": len(arrivals), "arms": rows}))
    else:
        _print(profile, arrivals, rows)
    return 0


def arms(args: argparse.Namespace, profile: DeviceProfile) -> Iterator[tuple[str, Policy | Stock]]:
    """Stock over chunk sizes, each division always, and the slo policy over all of them."""
    try:
        chunks = [int(chunk) for chunk in args.chunks.split(",")]
    except ValueError:
        raise CommandError(f"--chunks is {args.chunks!r} but must be numbers with commas, such as 512,2048") from None
    if min(chunks) < 1:
        raise CommandError(f"--chunks has {min(chunks)} but each must be at least 1")
    for chunk in chunks:
        yield f"stock, chunk {chunk}", Stock(chunk)
    groups = profile.groups
    for number, group in enumerate(groups, start=1):
        yield group.label, FixedPolicy(number, len(groups), _ALL)
    yield "slo", slo(profile, args.itl_slo_ms, args.ttft_slo_ms)


def slo(profile: DeviceProfile, itl_slo_ms: float | None, ttft_slo_ms: float | None = None) -> SloPolicy:
    """The slo policy over the profile's divisions, which knows of the device only what an engine knows."""
    shares = [
        Share(group.sharing == "disjoint", group.prefill_sms / (group.prefill_sms + group.decode_sms))
        for group in profile.groups
    ]
    # Of decode the ratio of its parts is known, which an engine takes from the model's config.
    alone = DecodeAlone(profile.decode_fixed_ms / (1 + DecodeAlone.FIXED_SHARE), profile.decode_ms_per_context_token)
    return SloPolicy(shares, Target(itl_slo_ms, ttft_slo_ms), alone, True, lambda text: None, profile.prompt_work)


def summary(result: Result, profile: DeviceProfile, requests: int, has_target: bool) -> dict[str, Any]:
    """The numbers of one arm; times in ms. `met_share`: of the requests whose TTFT and mean time per output token are
    within the targets; None without any."""
    beside_ms = sum(result.residency_ms.values()) or 1.0
    longest_first = sorted(result.residency_ms.items(), key=lambda item: item[1], reverse=True)
    names = {STOCK: STOCK} | {number: group.label for number, group in enumerate(profile.groups, start=1)}
    return {
        "ttft_p50_ms": quantile(result.ttft_ms, 0.5),
        "ttft_p99_ms": quantile(result.ttft_ms, 0.99),
        "itl_p50_ms": result.itl_ms(0.5),
        "itl_p99_ms": result.itl_ms(0.99),
        "met_share": result.met / requests if has_target else None,
        "makespan_s": result.makespan_ms / 1e3,
        "residency": {names[key]: value / beside_ms for key, value in longest_first},
    }


_ALL = LayerRule(layers_per_group=ALL_LAYERS)


def _check_lengths(arrivals: list[Arrival], profile: DeviceProfile) -> None:
    longest = max((one.prompt_tokens + one.answer_tokens for one in arrivals), default=0)
    if longest > profile.kv_tokens:
        raise CommandError(
            f"a request has {longest:,} tokens but the profile's KV cache holds {profile.kv_tokens:,}: shorten it"
        )


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.trace is not None:
        return read_trace(args.trace, args.requests, args.speed or 1.0)
    return steady(args.rate, args.requests, args.prompt_tokens, args.answer_tokens)


def _print(profile: DeviceProfile, arrivals: list[Arrival], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{len(arrivals)} requests, {profile.name}"
    table = Table("", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "within targets", "prefill in", title=title)
    for row in rows:
        times = [f"{row[name]:,.1f}" for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
        residency = ", ".join(f"{name} {share:.0%}" for name, share in list(row["residency"].items())[:3])
        met = "-" if row["met_share"] is None else f"{row['met_share']:.1%}"
        table.add_row(row["arm"], *times, met, residency)
    Console(highlight=False).print(table)
    print("within targets: TTFT at most --ttft-slo-ms, and the mean time per output token at most --itl-slo-ms")
    print("prefill in: of the time in which both lanes had work, the share of each division, or of stock's mixed steps")
