# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux plan`: what a configuration does on a device of so many SMs. Needs no GPU, no vLLM and no torch.

With a model it also says which layers go together, and with a profile of the device how long things would take. What
a load over time makes of the device is for `simulate` to say, which answers here too where a load is given.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_pdmux.cli import CommandError, simulate
from vllm_pdmux.cli.predicted import Beside, predictions
from vllm_pdmux.config import ConfigError, PDMuxConfig, Resolved, resolve
from vllm_pdmux.policy import Load, OffPolicy, Policy, SloPolicy, TablePolicy
from vllm_pdmux.policy_from_config import build_policy
from vllm_pdmux.simulator import ProfileError
from vllm_pdmux.simulator.profile import MOST_BYTES, read_profile
from vllm_pdmux.small_file import read_small_file
from vllm_pdmux.spatial import Group, SplitError, stream_groups

NAME = "plan"
HELP = "Show how a configuration divides the SMs of a device, and which division a load would get."

DEFAULT_PREFILL_TOKENS = 8192
DEFAULT_CONTEXT_TOKENS = 2048
DEFAULT_DECODE_BATCH = 32  # for predictions alone
OLDEST = (8, 0)  # compute capability that SM partitions need
# Any number of layers gives the same group; only the layers to advance depend on it, and those are then not shown.
_ANY_LAYERS = 1
# What configs of models call the number of their layers.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plan`."""
    parser.add_argument("--sms", type=_integer(1), help="SMs of the device, such as 132")
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
    parser.add_argument("--model", help="folder of the model, instead of --layers: show its layer groups")
    parser.add_argument(
        "--profile", help="of the device and model, from calibrate --out: show the ITL and the prefill that it predicts"
    )
    parser.add_argument(
        "--context-tokens",
        type=_integer(0),
        help=f"with --profile: context of each request decoding (default: {DEFAULT_CONTEXT_TOKENS})",
    )
    over_time = parser.add_argument_group("over time", "with --profile: what `simulate` predicts for a trace or a rate")
    simulate.add_load_arguments(over_time)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print all groups, or the one for `--decode-batch`. Raises CommandError for files and options that are wrong."""
    if _has_load_over_time(args):
        return simulate.run(args)
    if args.sms is None:
        raise CommandError("--sms is not given: give the SMs of the device, such as --sms 132, or --trace or --rate")
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
    model_layers = _layers_of(args.model) if args.model is not None else args.layers
    answers = not isinstance(policy, SloPolicy)
    chosen, layers = (None, None)
    if answers and args.decode_batch is not None:
        chosen, layers = _choose(policy, args, model_layers, args.decode_batch)
    layer_groups = None
    if answers and args.model is not None:
        # Without a number of decoding requests for any of them: it does not change the layers, only 0 does.
        batch = 1 if args.decode_batch is None else args.decode_batch
        layers_of_step = _choose(policy, args, model_layers, batch)[1]
        if model_layers is not None and layers_of_step is not None:
            layer_groups = _layer_groups(layers_of_step, model_layers)
    predicted = _predicted(args, groups)
    if args.json:
        found = _as_json(groups, chosen, layers)
        if args.model is not None:
            found |= {"model_layers": model_layers, "layer_groups": layer_groups}
        print(json.dumps(found if predicted is None else found | {"predicted": [asdict(one) for one in predicted]}))
        return 0
    _print_table(groups, chosen, layers, policy, resolved)
    if args.model is not None:
        _print_layers(model_layers, layer_groups, args, resolved.config)
    if predicted is not None:
        _print_predicted(predicted, args)
    return 0


def _has_load_over_time(args: argparse.Namespace) -> bool:
    """Whether `simulate` is asked. Raises CommandError for what goes with one of the two questions alone."""
    defaults = argparse.ArgumentParser()
    simulate.add_load_arguments(defaults)
    over_time = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(defaults.parse_args([])).items()
        if getattr(args, name) != value
    ]
    if args.trace is None and args.rate is None:
        if over_time:
            raise CommandError(f"{', '.join(over_time)}: of a load over time: add --trace or --rate, or leave it out")
        return False
    at_once = {"--config": args.config, "--decode-batch": args.decode_batch, "--prefill-tokens": args.prefill_tokens}
    at_once |= {"--layers": args.layers, "--model": args.model, "--context-tokens": args.context_tokens}
    at_once |= {"--sms": args.sms}
    if given := [name for name, value in at_once.items() if value is not None]:
        raise CommandError(
            f"{', '.join(given)}: not with a load over time, which the divisions of --profile serve: leave out"
        )
    if args.profile is None:
        raise CommandError("--trace and --rate need the times of a device: give --profile, from calibrate --out")
    return True


def _check_load(policy: Policy, args: argparse.Namespace) -> None:
    given = {"--decode-batch": args.decode_batch, "--prefill-tokens": args.prefill_tokens, "--layers": args.layers}
    has_use = args.profile is not None or args.model is not None  # for other than the policy's answer
    if has_use:
        del given["--prefill-tokens"]
    if args.profile is not None:
        del given["--decode-batch"]
    names = ", ".join(name for name, value in given.items() if value is not None)
    if names and isinstance(policy, SloPolicy):
        instead = "leave it out" if args.profile is not None else "leave it out, or give --profile"
        raise CommandError(f"{names}: policy slo decides by measured steps, of which there are none here: {instead}")
    if names and args.decode_batch is None:
        raise CommandError("--prefill-tokens and --layers describe a load: add --decode-batch, or leave them out")
    if args.model is not None and args.layers is not None:
        raise CommandError(f"--layers is {args.layers} but --model says it too: leave one of them out")
    if args.context_tokens is not None and args.profile is None:
        raise CommandError(f"--context-tokens is {args.context_tokens} but only a profile uses it: add --profile")


def _layers_of(model: str) -> int:
    """Layers that the config of a model's folder says. Raises CommandError."""
    path = Path(model).expanduser() / "config.json"
    try:
        config = json.loads(read_small_file(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CommandError(
            f"--model is {model!r} but {path} cannot be read ({reason}): give the folder of a model, or --layers"
        ) from None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        for name in _LAYER_COUNTS:
            if isinstance(part, dict) and type(part.get(name)) is int and part[name] > 0:
                return int(part[name])
    raise CommandError(
        f"--model is {model!r} but {path} has none of {', '.join(_LAYER_COUNTS)}: give --layers and --decode-batch"
    )


def _choose(
    policy: Policy, args: argparse.Namespace, model_layers: int | None, decode_batch: int
) -> tuple[int, int | None]:
    """(group, layers of the model that one step advances; None when the model's layers were not given)."""
    prefill_tokens = DEFAULT_PREFILL_TOKENS if args.prefill_tokens is None else args.prefill_tokens
    decision = policy.decide(Load(decode_batch, prefill_tokens, model_layers or _ANY_LAYERS))
    return decision.group, None if model_layers is None else min(decision.layers, model_layers)


def _layer_groups(layers: int, model_layers: int) -> list[tuple[int, int]]:
    """(first layer, end) of each layer group of a prefill whose load does not change; none for layers 0."""
    if layers < 1:
        return []
    return [(first, min(first + layers, model_layers)) for first in range(0, model_layers, layers)]


def _predicted(args: argparse.Namespace, groups: Sequence[Group]) -> list[Beside] | None:
    """For each group; None without a profile."""
    if args.profile is None:
        return None
    try:
        profile = read_profile(args.profile)
    except ProfileError as error:
        raise CommandError(str(error)) from error
    for group in profile.groups:
        if (total := group.prefill_sms + group.decode_sms) != args.sms:
            raise CommandError(f"--sms is {args.sms} but --profile is of a device with {total}: give that number")
    return predictions(profile, groups, *_load(args))


def _load(args: argparse.Namespace) -> tuple[int, int, int]:
    """(requests decoding, context of each, new tokens of a prompt) that predictions are for."""
    batch, context, prompt = args.decode_batch, args.context_tokens, args.prefill_tokens
    return (
        DEFAULT_DECODE_BATCH if batch is None else batch,
        DEFAULT_CONTEXT_TOKENS if context is None else context,
        DEFAULT_PREFILL_TOKENS if prompt is None else prompt,
    )


def _as_json(groups: Sequence[Group], chosen: int | None, layers: int | None) -> dict[str, Any]:
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


def _print_layers(
    model_layers: int, layer_groups: list[tuple[int, int]] | None, args: argparse.Namespace, config: PDMuxConfig
) -> None:
    if layer_groups is None:
        print(f"layer groups of the model's {model_layers} layers: policy slo chooses them while it serves")
        return
    tokens = DEFAULT_PREFILL_TOKENS if args.prefill_tokens is None else args.prefill_tokens
    shown = ", ".join(f"{first}-{end - 1}" for first, end in layer_groups) or "none"
    print(f"layer groups of the model's {model_layers} layers, for {tokens:,} new tokens: {shown}")
    if config.layers_per_group is None and config.split_forward_token_budget is None:
        print("on a GPU, with neither layers_per_group nor split_forward_token_budget set: as many as keep it busy")


def _print_predicted(predicted: list[Beside], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    batch, context, prompt = _load(args)
    title = f"predicted: {batch:,} requests decoding at {context:,} tokens each, a prompt of {prompt:,}"
    table = Table("group", "ITL ms", "prefill ms", "prefill tokens/s", title=title)
    for one in predicted:
        rate = None if not one.prefill_ms else prompt / one.prefill_ms * 1e3
        table.add_row(str(one.group), *(_number(value) for value in (one.itl_ms, one.prefill_ms, rate)))
    Console(highlight=False).print(table)
    missing = [str(one.group) for one in predicted if not one.is_known]
    if missing:
        print(f"the profile does not know group {', '.join(missing)}: calibrate this configuration (--config) for them")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


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
