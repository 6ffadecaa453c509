# SPDX-License-Identifier: Apache-2.0
"""Several benchmarks one after another on engines that start once: starting a pair of an 8B model takes two minutes.

    python benchmarks/together.py \\
        "replay --trace azure_conv_2023.csv --speed 3 --groups capped:84 --kv-gib 44 --calibrate --out a.json" \\
        "frontier --cells 16:16384:8192 --groups capped:84 --kv-gib 44 --out b.json"

Each argument is the command line of `replay.py` or `frontier.py`, all for the same engines: what these are made of
(--shape, --groups, --total-sms, --kv-gib) must be the same in all. Each writes its own file, with its own command. One
that fails is named, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

import frontier
import replay

BENCHMARKS = {"frontier": frontier, "replay": replay}
OF_ENGINES = ("shape", "groups", "total_sms", "kv_gib", "max_prefill_tokens")
ARMS = ("stock", "pdmux")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", nargs="+", help="of frontier or replay, in quotes")
    commands = [shlex.split(command) for command in parser.parse_args().command]
    if unknown := [command[0] for command in commands if command[0] not in BENCHMARKS]:
        parser.error(f"a command begins with {unknown[0]}: it must be one of {', '.join(BENCHMARKS)}")
    jobs = [(command, arguments(command)) for command in commands]
    first = jobs[0][1]
    for _, args in jobs[1:]:
        for name in OF_ENGINES:
            if getattr(args, name) != getattr(first, name):
                option = "--" + name.replace("_", "-")
                values = f"{getattr(first, name)} and {getattr(args, name)}"
                parser.error(f"{option} is {values} in two commands: give all the same engines")
    sys.exit(run(jobs))


def arguments(command: list[str]) -> Any:
    """Of one command; its own command line stands in the file that it writes."""
    sys.argv = [f"{command[0]}.py", *command[1:]]
    return BENCHMARKS[command[0]].arguments()


def run(jobs: list[tuple[list[str], Any]]) -> int:
    """All jobs on one pair of engines; the exit status."""
    engines = {arm: frontier.Process(arm, jobs[0][1]) for arm in ARMS}
    ready = {arm: engine.answer() for arm, engine in engines.items()}
    failed = 0
    for command, args in jobs:
        sys.argv = [f"{command[0]}.py", *command[1:]]
        try:
            BENCHMARKS[command[0]].measure_on(args, engines, ready)
        except RuntimeError as error:
            failed += 1
            print(f"together.py: {shlex.join(command)}: {error}", file=sys.stderr, flush=True)
    for engine in engines.values():
        engine.close()
    return 1 if failed else 0


if __name__ == "__main__":
    main()
