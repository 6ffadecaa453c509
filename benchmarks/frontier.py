# SPDX-License-Identifier: Apache-2.0
"""ITL of running requests against prefill throughput: stock vLLM over chunk sizes, the plugin over its groups.

A cell is B:C:P, B requests decoding at context C while prompts of P new tokens are prefilled one after another. Each
arm (``stock``, ``pdmux``, or the plugin with another backend, ``pdmux@streams``) is an engine in a process of its own.
With ``--kv-gib`` all are up at once and take turns setting by setting, so that what drifts meets all; while one runs
the others are idle. Cells too large for that are measured without it: one engine after the other, each with all rounds
and all of the memory.

    python benchmarks/frontier.py --cells 32:2048:8192,16:16384:8192,128:2048:8192 --chunks 192,256,320,512 \\
        --groups capped:100,capped:84,capped:68,disjoint:84,disjoint:68 --rounds 3 --kv-gib 44 --out frontier.json

Prints, for each setting, the median over the rounds of: ITL alone (nothing to prefill), ITL p50, p99 and max beside
prefill in ms, prefill tokens per second beside decode; for each arm the TTFT in ms of a prompt with nothing decoding,
the time to start and the tokens that the KV cache holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import shapes
from cell import ANSWER
from machine import command_line, spread


def main() -> None:
    args = arguments()
    results = Results(args)
    arms = args.arms.split(",")
    for together in [arms] if args.kv_gib else [[arm] for arm in arms]:
        engines = {arm: Process(arm, args) for arm in together}
        results.arms |= {arm: engine.answer() for arm, engine in engines.items()}  # none starts while another measures
        measure(args, engines, results)
        for engine in engines.values():
            engine.close()
    for line in summary(results.rows):
        print(" ".join(f"{key}={show(value)}" for key, value in line.items()))
    print(json.dumps(results.arms))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="32:2048:8192,16:16384:8192,128:2048:8192")
    parser.add_argument("--chunks", default="192,256,320,512", help="of stock: max_num_batched_tokens")
    parser.add_argument("--groups", default="capped:100,capped:84,capped:68,disjoint:84,disjoint:68")
    parser.add_argument("--slo", default="", help="targets of the policy slo, ITL in ms with commas, measured too")
    parser.add_argument("--calibrate", action="store_true", help="let slo begin with a calibration")
    parser.add_argument("--shape", default="llama-8b", choices=shapes.CONFIGS)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=4.0)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, help="KV cache of each engine, where all are up at once")
    parser.add_argument("--arms", default="stock,pdmux")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure_on(args: argparse.Namespace, engines: dict[str, Process], ready: dict[str, dict[str, Any]]) -> None:
    """All cells, on engines that are up and have said `ready`."""
    results = Results(args)
    results.arms |= ready
    measure(args, engines, results)


def measure(args: argparse.Namespace, engines: dict[str, Process], results: Results) -> None:
    """All cells, on engines that are up."""
    if args.calibrate and "pdmux" in engines:
        results.calibration = engines["pdmux"].ask({"calibrate": True})
    for arm, engine in engines.items():
        tokens = {cell.split(":")[2] for cell in args.cells.split(",")}
        for one in sorted(tokens, key=int):
            results.arms[arm][f"prefill_alone_{one}"] = engine.ask({"alone": int(one)})
    for cell in args.cells.split(","):
        for round_number in range(args.rounds):
            for arm, setting in turns(args, list(engines)):
                order = {"cell": cell, "setting": setting, "prompts": args.prompts, "limit_s": args.limit_s}
                found = engines[arm].ask(order)
                results.add({"arm": arm, "setting": setting, "cell": cell, "round": round_number, **found})


def turns(args: argparse.Namespace, arms: list[str]) -> list[tuple[str, Any]]:
    """Every setting of every arm once, the arms taking turns."""
    settings = {arm: list(settings_of(arm, args)) for arm in arms}
    if "pdmux" in arms:
        settings["pdmux"] += [f"slo:{target}" for target in args.slo.split(",") if target]
    longest = max(len(settings[arm]) for arm in arms)
    return [(arm, settings[arm][i]) for i in range(longest) for arm in arms if i < len(settings[arm])]


def settings_of(arm: str, args: argparse.Namespace) -> list[Any]:
    """Of another backend two groups, to compare it, and of plain streams the one that it has."""
    if arm == "stock":
        return [int(chunk) for chunk in args.chunks.split(",")]
    groups = args.groups.split(",")
    if arm.endswith("@streams"):
        return [group for group in groups if group.startswith("capped")][:1]
    return groups[:2] if "@" in arm else groups


class Process:
    """An engine in a process of its own."""

    def __init__(self, arm: str, args: argparse.Namespace):
        name, _, backend = arm.partition("@")
        options = {
            "arm": name,
            "shape": args.shape,
            "groups": "" if name == "stock" else ",".join(settings_of(arm, args)),
            "backend": backend or "auto",
            "total-sms": args.total_sms,
            "kv-gib": args.kv_gib,
            "max-prefill-tokens": args.max_prefill_tokens,
        }
        command = [sys.executable, str(Path(__file__).with_name("cell.py"))]
        for name, value in options.items():
            command += [] if value is None else [f"--{name}", str(value)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.communicate(timeout=120)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                found = json.loads(line[len(ANSWER) :])
                if "error" in found:
                    raise RuntimeError(f"the engine could not: {found['error']}")
                return found
        raise RuntimeError(f"the engine has ended with status {self._process.wait()}")


class Results:
    """What has been measured; written after each row, should a later one be cut off."""

    def __init__(self, args: argparse.Namespace):
        self._out: Path | None = args.out
        self.rows: list[dict[str, Any]] = []
        self.arms: dict[str, dict[str, Any]] = {}
        self.calibration: dict[str, Any] | None = None  # what it has found

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if self._out is not None:
            machine = next(iter(self.arms.values()))
            common = {name: machine[name] for name in ("machine", "versions", "python")}
            arms = {arm: {k: v for k, v in found.items() if k not in common} for arm, found in self.arms.items()}
            result = {
                **common,
                "command": command_line(),
                "arms": arms,
                **({} if self.calibration is None else {"calibration": self.calibration}),
                "summary": summary(self.rows),
                "rows": self.rows,
            }
            self._out.write_text(json.dumps(result, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and spread over the rounds, by cell, arm and setting."""
    keys = list(dict.fromkeys((row["cell"], row["arm"], row["setting"]) for row in rows))
    lines = []
    for cell, arm, setting in sorted(keys, key=lambda key: key[0]):
        same = [row for row in rows if (row["cell"], row["arm"], row["setting"]) == (cell, arm, setting)]
        values = {k: spread([row[k] for row in same]) for k in same[0] if isinstance(same[0][k], float)}
        lines.append({"cell": cell, "arm": arm, "setting": setting, **values})
    return lines


def show(value: Any) -> str:
    return f"{value['median']:.1f}" if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    main()
