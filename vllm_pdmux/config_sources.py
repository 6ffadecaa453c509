# SPDX-License-Identifier: Apache-2.0
"""One source of settings: reading a file, and finding everything that is wrong in a source at once."""

import json
import os
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

from vllm_pdmux.config_errors import ConfigError, show, unknown_key
from vllm_pdmux.config_model import FIELDS, inconsistencies, wrong_fields
from vllm_pdmux.small_file import TooLarge, read_small_file

SGLANG_FIELDS = frozenset({"sm_group_num", "manual_divisions", "decode_bs_divisor", "split_forward_token_budget"})
# Fields by which a file says "I divide the SMs"; how many groups there are must then be written, as SGLang requires.
_DIVIDING_FIELDS = frozenset({"manual_divisions", "decode_bs_divisor"})
MOST_BYTES = 64 << 10  # of a file, which takes PyYAML up to some seconds; all settings together are a few hundred


def read_file(path: str, label: str) -> dict[Any, Any]:
    """The one mapping in a YAML or JSON file. Raises ConfigError, starting with `label`, for anything else."""
    full_path = os.path.abspath(os.path.expanduser(path))
    try:
        content = read_small_file(full_path, MOST_BYTES)
    except TooLarge as error:
        raise ConfigError(f"{label}: {error}, more than settings take: name the file of the settings") from None
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


class _GivenTwice(ValueError):
    def __init__(self, key: str, where: str = ""):
        super().__init__(f"{reprlib.repr(key)} is given twice{where}")


class _Loader(yaml.SafeLoader):
    """Without aliases: a few lines of them may stand for more than any memory holds, and no setting needs one.

    A key that is given twice is an error, where PyYAML takes the last one.
    """

    # A library of vLLM's makes every SafeLoader of the process read dates as text.
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.constructor.SafeConstructor.construct_yaml_timestamp,
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # so it is in PyYAML's stubs
            raise yaml.composer.ComposerError(None, None, "aliases are not read: write the value out", where)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """PyYAML calls it once for each mapping, before it puts in what is merged (<<) and makes a dict."""
        given = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in given:
                    raise _GivenTwice(key.value, f", the second time in line {key.start_mark.line + 1}")
                given.add(key.value)
        super().flatten_mapping(node)


def _parse(content: bytes, label: str) -> Any:
    try:
        return yaml.load(content, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except _GivenTwice as twice:
        raise ConfigError(f"{label}: {twice}: remove one of them") from None
    except Exception as error:  # noqa: BLE001 - PyYAML reads !!bool x with a KeyError, !!int "" with an IndexError
        try:
            return json.loads(content, object_pairs_hook=_given_once)  # JSON indented with tabs is not YAML
        except _GivenTwice as twice:
            raise ConfigError(f"{label}: {twice}: remove one of them") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{label}: is not YAML or JSON ({_yaml_reason(error)}): correct it there") from None


def _given_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _GivenTwice(key)
        values[key] = value
    return values


def _yaml_reason(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        if isinstance(error, (yaml.YAMLError, ValueError)):
            return str(error)
        if isinstance(error, RecursionError):
            return "nested too deeply"
        return f"a value is not what its tag, such as !!int, says: {error}"
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
