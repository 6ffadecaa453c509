# SPDX-License-Identifier: Apache-2.0
"""The settings themselves: names, units, defaults, limits. Where they come from is in `config_sources`.

The first four after `enabled` are SGLang's, with its names, defaults and meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vllm_pdmux.config_errors import show, wrong_value

_ROW_ALLOWED = "three integers, [prefill_sms >= 1, decode_sms >= 1, min_decode_batch >= 0]"
_MOST_BITS = 63  # of an integer: none counts more than memory holds, and Python does not write very long ones

_SHARING_ALLOWED = "'capped' or 'disjoint', or a list of them with one for each division"


def _rows(value: Any) -> Any:
    """Manual rows as tuples; nothing (`null`, `[]`) is the automatic split. Reports every wrong row, by its number."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(
            f"manual_divisions is {show(value)} but must be a list of rows, each of {_ROW_ALLOWED}: change it"
        )
    wrong = [f"row {number} is {show(row)}" for number, row in enumerate(value, start=1) if not _is_row(row)]
    if wrong:
        raise ValueError(f"manual_divisions {', '.join(wrong)} but must be {_ROW_ALLOWED}: correct or remove the row")
    return tuple(tuple(row) for row in value)


def _is_row(row: Any) -> bool:
    if not isinstance(row, (list, tuple)) or len(row) != 3 or not all(map(_is_int, row)):
        return False
    prefill_sms, decode_sms, min_decode_batch = (int(number) for number in row)
    return prefill_sms >= 1 and decode_sms >= 1 and min_decode_batch >= 0


def _is_int(value: Any) -> bool:
    return type(value) is int and value.bit_length() <= _MOST_BITS


def _sharing(value: Any) -> Any:
    """One word for all groups, or a tuple of one for each."""
    words = value if isinstance(value, (list, tuple)) else [value]
    if not words or any(word not in get_args(Sharing) for word in words):
        raise ValueError(f"sharing is {show(value)} but must be {_SHARING_ALLOWED}: change it (the default is capped)")
    return value if isinstance(value, str) else tuple(value)


def _policy(value: Any) -> Any:
    return "off" if value is False else value  # YAML reads the word off as false


def _calibration(value: Any) -> Any:
    if value is False:
        return "off"  # likewise
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"calibration is {show(value)} but must be 'auto', 'off' or the path of a profile: "
            "change it (the default is auto)"
        )
    return value


Sharing = Literal["capped", "disjoint"]
Sms = Annotated[int, Field(ge=1)]
Row = tuple[Sms, Sms, Annotated[int, Field(ge=0)]]


LONGEST_MS = 1_000_000_000  # eleven days: what is multiplied with it stays a number


class PDMuxConfig(BaseModel):
    """Every setting of vllm_pdmux. Frozen; integers are strict ("8", 8.0 and true are refused); no other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(True, description="Whether prefill and decode are multiplexed; false leaves vLLM as it is.")
    sm_group_num: int = Field(
        8,
        ge=3,
        le=256,
        description="Number of stream groups: prefill alone, decode alone, and sm_group_num - 2 divisions between.",
    )
    manual_divisions: Annotated[tuple[Row, ...], BeforeValidator(_rows)] = Field(
        (),
        description="sm_group_num - 2 rows [prefill_sms, decode_sms, min_decode_batch]: SMs of each lane, summing to "
        "the device's, and the smallest number of decoding requests for the row. Empty: an automatic split.",
    )
    sharing: Annotated[Sharing | tuple[Sharing, ...], BeforeValidator(_sharing)] = Field(
        "capped",
        description="capped: prefill is confined to its SMs, decode has all of them at a higher priority. disjoint: "
        "each lane has its own SMs, decode by CUDA graphs captured there. One for all divisions, or a list of them.",
    )
    backend: Literal["auto", "cuda", "sgl_kernel", "streams", "serial"] = Field(
        "auto",
        description="What makes the partitions: the driver through cuda-bindings (cuda), sgl_kernel.spatial "
        "(sgl_kernel), nothing but two streams with priorities (streams, for comparison), nothing at all (serial: a "
        "machine without a GPU). auto: cuda on a GPU, serial on a CPU.",
    )
    decode_bs_divisor: int = Field(
        36,
        ge=1,
        description="Decoding requests at which the last division is reached, without manual_divisions.",
    )
    split_forward_token_budget: int | None = Field(
        None,
        ge=1,
        description="Layers times new prompt tokens of one layer group; not set: an eighth of the model's layers each, "
        "or 65536 when a file sets sm_group_num.",
    )
    policy: Annotated[Literal["table", "fixed", "slo", "off"], BeforeValidator(_policy)] = Field(
        "table",
        description="What chooses the division: the decode batch (table), fixed_group always (fixed), or what was "
        "measured of the steps so far, for targets (slo; the default when there is one). off: stock vLLM's steps.",
    )
    itl_slo_ms: float | None = Field(
        None,
        gt=0,
        le=LONGEST_MS,
        allow_inf_nan=False,
        description="Milliseconds between two tokens of a request, which all but a few steps beside prefill should "
        "keep, and the usual ones where first tokens would be late, with policy slo; not set: 1.5 times what a decode "
        "step takes alone.",
    )
    ttft_slo_ms: float | None = Field(
        None,
        gt=0,
        le=LONGEST_MS,
        allow_inf_nan=False,
        description="Milliseconds until the first token of an answer, with policy slo. Prefill is made as fast as it "
        "needs, at the cost of slow steps, and a short prompt may overtake one that is half done. Not set: neither, in "
        "the order of arrival.",
    )
    calibration: Annotated[str, BeforeValidator(_calibration)] = Field(
        "auto",
        description="What policy slo believes of the device before it has served anything. auto: what `vllm-pdmux "
        "calibrate` has stored for this GPU, model and divisions, if anything. off: nothing. Else the path of a "
        "profile.",
    )
    prefill_wait_limit_ms: float | None = Field(
        None,
        gt=0,
        le=LONGEST_MS,
        allow_inf_nan=False,
        description="Milliseconds after which a prompt that still waits lets ITL grow above its target, with policy "
        "slo; not set: 10000.",
    )
    itl_limit_ms: float | None = Field(
        None,
        gt=0,
        le=LONGEST_MS,
        allow_inf_nan=False,
        description="Milliseconds between two tokens that should be kept even then, if any division can; not set: 4 "
        "times the target.",
    )
    fixed_group: int | None = Field(
        None, ge=1, description="The stream group that policy fixed uses, 1 to sm_group_num - 2."
    )
    layers_per_group: int | None = Field(
        None, ge=1, description="Layers of one layer group; before split_forward_token_budget. Not with policy slo."
    )
    max_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="New prompt tokens that go through the prefill lane together, at most; not set: vLLM's "
        "max_num_batched_tokens. Memory for activations is set aside for so many on each division's stream.",
    )
    graph_memory_share: float = Field(
        0.03,
        ge=0,
        le=0.5,
        allow_inf_nan=False,
        description="Share of the KV cache's memory that the decode graphs of disjoint divisions may take, at most.",
    )
    graph_capture_s: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds of start-up that capturing the decode graphs of disjoint divisions may take.",
    )
    lane: Literal["threaded", "serial"] = Field(
        "threaded",
        description="threaded: prefill runs beside decode. serial: no second thread, all layers at once; for tests.",
    )
    experimental_tensor_parallel: bool = Field(
        False,
        description="Whether --tensor-parallel-size above 1 is served. It has been tested on CPUs with two processes "
        "and has not been run on several GPUs.",
    )
    trace_steps: int = Field(0, ge=0, description="Number of last steps that the scheduler keeps a record of; 0: none.")
    trace_file: str | None = Field(
        None, min_length=1, description="Where to write each step, for Perfetto or chrome://tracing; unset: nowhere."
    )

    watchdog_s: float = Field(
        120.0, ge=0, allow_inf_nan=False, description="Seconds without progress of the lane until it is told; 0: never."
    )
    watchdog_action: Literal["log", "fail", "exit"] = Field(
        "log",
        description="What is done then: all stacks to the log; with fail what is in the lane ends with an error, on a "
        "GPU; with exit the process ends.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "PDMuxConfig":
        if problems := inconsistencies(dict(self)):
            raise ValueError("; ".join(problem.text for problem in problems))
        return self


FIELDS = tuple(PDMuxConfig.model_fields)
TARGETS = ("itl_slo_ms", "ttft_slo_ms")  # of policy slo, which they ask for
LIMITS = ("prefill_wait_limit_ms", "itl_limit_ms")  # of policy slo too


@dataclass(frozen=True)
class Inconsistency:
    """Values that are each allowed but do not go together, and the fields they belong to."""

    fields: tuple[str, ...]
    text: str


def inconsistencies(values: Mapping[str, Any]) -> list[Inconsistency]:
    """What does not go together in `values`, which may be some of the settings: a rule with a field missing is not
    applied, so that one source can be checked before the others are known."""
    groups, rows = values.get("sm_group_num"), values.get("manual_divisions")
    problems = []
    if groups is not None and rows and len(rows) != groups - 2:
        text = (
            f"manual_divisions has {len(rows)} rows but sm_group_num {groups} needs {groups - 2}, one for each group "
            f"but the first and the last: set sm_group_num to {len(rows) + 2} or give {groups - 2} rows"
        )
        problems.append(Inconsistency(("sm_group_num", "manual_divisions"), text))
    sharing = values.get("sharing")
    if groups is not None and isinstance(sharing, (list, tuple)) and len(sharing) != groups - 2:
        text = (
            f"sharing lists {len(sharing)} but sm_group_num {groups} needs {groups - 2}, one for each division: "
            f"give {groups - 2}, or one word for all"
        )
        problems.append(Inconsistency(("sm_group_num", "sharing"), text))
    for target in TARGETS + LIMITS:
        if {"policy", target} <= values.keys():
            problems += _target_problems(values["policy"], target, values[target])
    if {"policy", "calibration"} <= values.keys():
        problems += _calibration_problems(values["policy"], values["calibration"])
    action = values.get("watchdog_action")
    if action in ("fail", "exit") and values.get("watchdog_s") == 0:
        text = (
            f"watchdog_action is {action} but watchdog_s 0 turns it off: set watchdog_s above 0, or remove "
            "watchdog_action"
        )
        problems.append(Inconsistency(("watchdog_s", "watchdog_action"), text))
    if action == "fail" and values.get("lane") == "serial":
        text = (
            "watchdog_action is fail but with lane serial the engine itself hangs where the lane does: set "
            "watchdog_action exit, or remove lane"
        )
        problems.append(Inconsistency(("lane", "watchdog_action"), text))
    layers = values.get("layers_per_group")
    if layers is not None and values.get("policy") == "slo":
        # The token budget is in SGLang's files, so it may stand there unused.
        text = f"layers_per_group is {layers} but policy slo, which chooses layers itself, does not use it: remove it"
        problems.append(Inconsistency(("policy", "layers_per_group"), text))
    target_ms, limit_ms = values.get("itl_slo_ms"), values.get("itl_limit_ms")
    if target_ms is not None and limit_ms is not None and limit_ms < target_ms:
        text = f"itl_limit_ms is {limit_ms:g} but must be at least itl_slo_ms, {target_ms:g}: raise it, or remove it"
        problems.append(Inconsistency(("itl_slo_ms", "itl_limit_ms"), text))
    if {"policy", "fixed_group"} <= values.keys():
        problems += _fixed_group_problems(values["policy"], values["fixed_group"], groups)
    return problems


def _target_problems(policy: str, name: str, value: float | None) -> list[Inconsistency]:
    if policy == "slo" or value is None:
        return []
    text = f"{name} is {value:g} but policy {policy} does not use it: set policy slo, or remove it"
    return [Inconsistency(("policy", name), text)]


def _calibration_problems(policy: str, value: str) -> list[Inconsistency]:
    if policy == "slo" or value in ("auto", "off", False):  # YAML reads the word off as false
        return []
    text = f"calibration is {show(value)} but policy {policy} does not use it: set policy slo, or remove it"
    return [Inconsistency(("policy", "calibration"), text)]


def _fixed_group_problems(policy: str, fixed_group: int | None, groups: int | None) -> list[Inconsistency]:
    fields = ("policy", "fixed_group")
    if policy == "fixed" and fixed_group is None:
        text = "fixed_group is not set but policy fixed needs it: set it to 1 to sm_group_num - 2, or use policy table"
        return [Inconsistency(fields, text)]
    if policy != "fixed" and fixed_group is not None:
        text = f"fixed_group is {fixed_group} but policy {policy} does not use it: set policy fixed, or remove it"
        return [Inconsistency(fields, text)]
    if fixed_group is not None and groups is not None and fixed_group > groups - 2:
        text = f"fixed_group is {fixed_group} but must be 1 to {groups - 2}, as sm_group_num is {groups}: lower it"
        return [Inconsistency((*fields, "sm_group_num"), text)]
    return []


def wrong_fields(values: Mapping[str, Any]) -> dict[str, str]:
    """Each of `values` (known settings, some or all) that is not allowed by itself -> what is wrong with it."""
    try:
        PDMuxConfig.model_validate(dict(values))
    except ValidationError as error:
        located = [(str(details["loc"][0]), details) for details in error.errors() if details["loc"]]
        wrong = {name: _text(name, details, values[name]) for name, details in located}
    else:
        wrong = {}
    limit = f"must have at most {_MOST_BITS} bits: lower it"
    long = {name: value for name, value in values.items() if type(value) is int and not _is_int(value)}
    return wrong | {name: f"{name} is {show(value)} but {limit}" for name, value in long.items()}


def _text(name: str, details: Any, value: Any) -> str:
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    return wrong_value(name, value, _allowed(name), PDMuxConfig.model_fields[name].default)


def _allowed(name: str) -> str:
    field = PDMuxConfig.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    most = "".join(f", at most {limit.le}" for limit in field.metadata if hasattr(limit, "le"))
    if any(hasattr(limit, "gt") for limit in field.metadata):
        return f"a number above 0{most}"
    limits = [limit.ge for limit in field.metadata if hasattr(limit, "ge")]
    if field.annotation is float:
        return f"a number, at least {limits[0]}{most}"
    if limits:
        return f"an integer, at least {limits[0]}{most}"
    if str in get_args(field.annotation):
        return "the path of a file"
    return " or ".join(repr(choice) for choice in get_args(field.annotation))
