# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux plan`: what a configuration does on a device of so many SMs. Needs no GPU, no vLLM and no torch."""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict

from vllm_pdmux.cli import CommandError
from vllm_pdmux.config import ConfigError, Resolved, resolve
from vllm_pdmux.policy import Load, OffPolicy, Policy, SloPolicy, TablePolicy
from vllm_pdmux.policy_from_config import build_policy
from vllm_pdmux.spatial import Group, SplitError, stream_groups

NAME = "plan"
HELP = "Show how a configuration divides the SMs of a device, and which division a load would get."

DEFAULT_PREFILL_TOKENS = 8192
OLDEST = (8, 0)  # compute capability that SM partitions need
# Any number of layers gives the same group; only the layers to advance depend on it, and those are then not shown.
_ANY_LAYERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plan`."""
    parser.add_argument("--sms", type=_integer(1), required=True, help="SMs of the device, such as 132")
    parser.add_argument(
        "--compute-capability", type=_compute_capability, default=(9, 0), help='such as "9.0" or "90" (default: 9.0)'
    )
    parser.add_argument("--config", help="configuration file; over the one named by PDMUX_CONFIG (default: defaults)")
    parser.add_argument("--decode-batch", type=_integer(0), help="requests decoding: show the group they would get")
    parser.add_argument(
        "--prefill-tokens",
        type=_integer(0),
        help=f"new tokens in the prefill batch, 0: nothing to prefill (default: {DEFAULT_PREFILL_TOKENS})",
    )
    parser.add_argument("--layers", type=_integer(1), help="layers of the model: show how many a step advances")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print all groups, or the one for `--decode-batch`. Raises CommandError for files and options that are wrong."""
    if args.compute_capability < OLDEST:
        asked, oldest = (".".join(map(str, version)) for version in (args.compute_capability, OLDEST))
        raise CommandError(f"compute capability {asked} is below {oldest}, which SM partitions need: use a newer GPU")
    try:
        resolved = resolve(None if args.config is None else {"config": args.config}, os.environ)
        config, source = resolved.config, resolved.origins["manual_divisions"]
        groups = stream_groups(config, args.sms, args.compute_capability, source=source)
        policy = build_policy(config, len(groups) - 2)
    except (ConfigError, SplitError) as error:
        raise CommandError(str(error)) from error
    _check_load(policy, args)
    chosen, layers = (None, None) if args.decode_batch is None else _choose(policy, args)
    if args.json:
        print(json.dumps(_as_json(groups, chosen, layers)))
    else:
        _print_table(groups, chosen, layers, policy, resolved)
    return 0


def _check_load(policy: Policy, args: argparse.Namespace) -> None:
    given = {"--decode-batch": args.decode_batch, "--prefill-tokens": args.prefill_tokens, "--layers": args.layers}
    names = ", ".join(name for name, value in given.items() if value is not None)
    if names and isinstance(policy, SloPolicy):
        raise CommandError(f"{names}: policy slo decides by measured steps, of which there are none here: leave it out")
    if names and args.decode_batch is None:
        raise CommandError("--prefill-tokens and --layers describe a load: add --decode-batch, or leave them out")


def _choose(policy: Policy, args: argparse.Namespace) -> tuple[int, int | None]:
    """(group, layers of the model that one step advances; None when the model's layers were not given)."""
    prefill_tokens = DEFAULT_PREFILL_TOKENS if args.prefill_tokens is None else args.prefill_tokens
    decision = policy.decide(Load(args.decode_batch, prefill_tokens, args.layers or _ANY_LAYERS))
    return decision.group, None if args.layers is None else min(decision.layers, args.layers)


def _as_json(groups: Sequence[Group], chosen: int | None, layers: int | None) -> dict:
    # `index` is called `group` outside, as in a configuration (fixed_group) and in SGLang.
    rows = [{"group": group.index} | asdict(group) for group in groups]
    for row in rows:
        del row["index"]
    if chosen is None:
        return {"groups": rows}
    answer = {name: rows[chosen][name] for name in ("group", "prefill_sms", "decode_sms")}
    return answer if layers is None else answer | {"layers": layers}


def _print_table(
    groups: Sequence[Group], chosen: int | None, layers: int | None, policy: Policy, resolved: Resolved
) -> None:
    from rich.console import Console
    from rich.table import Table

    total_sms = groups[0].prefill_sms
    table = Table("", "group", "sharing", "prefill SMs", "decode SMs", "used for", title=f"{total_sms} SMs")
    for group, use in zip(groups, _uses(groups, policy), strict=True):
        mark = ">" if group.index == chosen else ""
        is_mixed = 0 < group.index < len(groups) - 1
        decode_sms = str(group.decode_sms)
        if is_mixed and group.sharing == "capped":
            decode_sms += f" of its own, all {total_sms}"
        sharing = group.sharing if is_mixed else ""
        table.add_row(mark, str(group.index), sharing, str(group.prefill_sms), decode_sms, use)
    Console(highlight=False).print(table)
    print(f"settings: {resolved.describe()}")
    asked, found = resolved.config.sm_group_num - 2, len(groups) - 2
    if found < asked:
        print(f"this device has only {found} of the {asked} automatic splits that sm_group_num asks for")
    if layers is not None:
        print(f"layers of the prefill in each step: {layers}")


def _uses(groups: Sequence[Group], policy: Policy) -> list[str]:
    if isinstance(policy, TablePolicy):
        firsts = policy.first_batches()
        uses = [f"decode batch >= {first}" for first in firsts]
        if min(firsts) > 1:
            uses[0] += ", or below every threshold"
    elif isinstance(policy, OffPolicy):
        uses = ["never"] * (len(groups) - 2)
    elif isinstance(policy, SloPolicy):
        uses = ["as measured steps allow"] * (len(groups) - 2)
    else:
        always = policy.decide(Load(1, 1, _ANY_LAYERS)).group
        uses = ["both lanes busy" if group.index == always else "never" for group in groups[1:-1]]
    return ["prefill alone", *uses, "decode alone"]


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text!r} but must be an integer, at least {least}")
        return int(text)

    return parse


def _compute_capability(text: str) -> tuple[int, int]:
    """ "9.0" or "90" -> (9, 0), "121" -> (12, 1): the last digit is the minor version."""
    match = re.fullmatch(r"([0-9]{1,2})\.?([0-9])", text)
    if not match:
        raise argparse.ArgumentTypeError(f'is {text!r} but must be written like "9.0" or "90"')
    return int(match[1]), int(match[2])
