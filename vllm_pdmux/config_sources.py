# SPDX-License-Identifier: Apache-2.0
"""One source of settings: reading a file, and finding everything that is wrong in a source at once."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_pdmux.config_errors import ConfigError, show, unknown_key
from vllm_pdmux.config_model import FIELDS, inconsistencies, wrong_fields

SGLANG_FIELDS = frozenset({"sm_group_num", "manual_divisions", "decode_bs_divisor", "split_forward_token_budget"})
# Fields by which a file says "I divide the SMs"; how many groups there are must then be written, as SGLang requires.
_DIVIDING_FIELDS = frozenset({"manual_divisions", "decode_bs_divisor"})


def read_file(path: str, label: str) -> dict[Any, Any]:
    """The one mapping in a YAML or JSON file. Raises ConfigError, starting with `label`, for anything else."""
    full_path = os.path.abspath(os.path.expanduser(path))
    try:
        content = Path(full_path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{label}: cannot be read as {full_path} ({reason}): correct path or rights") from None
    values = _parse(content, label)
    if not values and not isinstance(values, (bool, int, float)):
        raise ConfigError(f"{label}: is empty: write at least one setting (such as sm_group_num: 8) or leave it out")
    if not isinstance(values, dict):
        raise ConfigError(f"{label}: holds {show(values)} but must be one mapping: write lines like sm_group_num: 8")
    return values


def check_source(raw: Mapping[Any, Any], label: str, *, is_file: bool) -> dict[str, Any]:
    """The settings of one source, or ConfigError with all that is wrong in it. `config` is a key of inline ones only.

    Rules between fields are applied here when the source sets all of them, so that a file is reported by itself.
    """
    values = {key: value for key, value in raw.items() if key in FIELDS}
    problems = [_stray_key(key, is_file) for key in raw if key not in FIELDS and (is_file or key != "config")]
    if not is_file and "config" in raw and not _is_path(raw["config"]):
        problems.append(f"config is {show(raw['config'])} but must be the path of a file: give a path or remove it")
    if is_file and "sm_group_num" not in values and _is_sglang_form(values):
        rows = values.get("manual_divisions")
        groups = len(rows) + 2 if isinstance(rows, list) and rows else 8
        present = ", ".join(name for name in FIELDS if name in values and name in SGLANG_FIELDS)
        problems.append(
            f"sm_group_num is missing but must be given, an integer, at least 3, in a file with {present}: "
            f"add sm_group_num: {groups}"
        )
    wrong = wrong_fields(values)
    sound = {name: value for name, value in values.items() if name not in wrong}
    problems += [*wrong.values(), *(problem.text for problem in inconsistencies(sound))]
    if problems:
        raise ConfigError(f"{label}: {'; '.join(problems)}")
    return values


def _parse(content: bytes, label: str) -> Any:
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        try:
            return json.loads(content)  # JSON indented with tabs is not YAML
        except (ValueError, RecursionError):
            raise ConfigError(f"{label}: is not YAML or JSON ({_yaml_reason(error)}): correct it there") from None


def _yaml_reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error) or "nested too deeply"
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{reason}, line {mark.line + 1}, column {mark.column + 1}"


def _stray_key(key: Any, is_file: bool) -> str:
    if is_file and key == "config":
        return "config is not allowed in a file, which cannot name another: remove it, or name that file inline"
    return unknown_key(key, FIELDS if is_file else (*FIELDS, "config"))


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _is_sglang_form(values: Mapping[str, Any]) -> bool:
    return bool(values) and (values.keys() <= SGLANG_FIELDS or not _DIVIDING_FIELDS.isdisjoint(values))
