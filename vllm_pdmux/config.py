# SPDX-License-Identifier: Apache-2.0
"""The configuration in force: every source read, checked and merged, with the origin of each value.

Later wins, field by field: defaults, the file named by PDMUX_CONFIG, the file named by the inline key `config`, and the
inline keys of `additional_config["pdmux"]`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_pdmux.config_errors import ConfigError, one_line, show
from vllm_pdmux.config_model import FIELDS, TARGETS, PDMuxConfig, inconsistencies
from vllm_pdmux.config_sources import check_source, read_file

__all__ = ["ENVIRONMENT_VARIABLE", "ConfigError", "PDMuxConfig", "Resolved", "resolve"]

ENVIRONMENT_VARIABLE = "PDMUX_CONFIG"
DEFAULT_ORIGIN = "default"
INLINE_ORIGIN = "additional_config"
IMPLIED = "implied by "
INLINE_LABEL = "additional_config['pdmux']"
# What SGLang uses when its file does not say; without such a file the layer rule has a default of its own.
SGLANG_TOKEN_BUDGET = 65536


@dataclass(frozen=True)
class Resolved:
    """The configuration, and for every field where its value is from.

    An origin is "default", "file PATH", "file PATH (PDMUX_CONFIG)", "additional_config" or "implied by …".
    """

    config: PDMuxConfig
    origins: dict[str, str]

    def describe(self) -> str:
        """One line for the log: each value that is not the default, with its origin; or "all defaults"."""
        changed = [name for name, value in self.config if value != PDMuxConfig.model_fields[name].default]
        values = [f"{name}={_plain(getattr(self.config, name))} ({self.origins[name]})" for name in changed]
        return one_line(", ".join(values)) or "all defaults"


def resolve(inline: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Resolved:
    """The configuration of `additional_config["pdmux"]` (None: not given) and the environment.

    Raises ConfigError: for one source with all of its problems, or for values of several sources that disagree.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, DEFAULT_ORIGIN)
    sglang_origin = None
    for origin, source in _sources(inline, environ):
        values |= source
        origins |= dict.fromkeys(source, origin)
        if "sm_group_num" in source and origin != INLINE_ORIGIN:
            sglang_origin = origin
    if sglang_origin and "split_forward_token_budget" not in values:
        values["split_forward_token_budget"] = SGLANG_TOKEN_BUDGET
        origins["split_forward_token_budget"] = f"{IMPLIED}sm_group_num in {sglang_origin}"
    target = next((name for name in TARGETS if values.get(name) is not None), None)
    if target is not None and "policy" not in values:
        values["policy"], origins["policy"] = "slo", f"{IMPLIED}{target}"
    _check_together(values, origins)
    return Resolved(PDMuxConfig.model_validate(values), origins)


def _sources(inline: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, settings) of each source, weakest first. The inline keys are checked first: they name a file."""
    if inline is not None and not isinstance(inline, Mapping):
        raise ConfigError(f"{INLINE_LABEL} is {show(inline)} but must be a mapping: write {{}} for all defaults")
    inline = inline or {}
    inline_values = check_source(inline, INLINE_LABEL, is_file=False)
    if environment_path := environ.get(ENVIRONMENT_VARIABLE):
        yield _file(environment_path, f"file {environment_path} ({ENVIRONMENT_VARIABLE})")
    if "config" in inline:
        path = os.fsdecode(inline["config"])
        yield _file(path, f"file {path}")
    yield INLINE_ORIGIN, inline_values


def _file(path: str, origin: str) -> tuple[str, dict[str, Any]]:
    return origin, check_source(read_file(path, origin), origin, is_file=True)


def _check_together(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    defaults = {name: field.default for name, field in PDMuxConfig.model_fields.items()}
    problems = inconsistencies({**defaults, **values})
    if not problems:
        return
    involved = dict.fromkeys(origins[name] for problem in problems for name in problem.fields)
    involved = {origin: None for origin in involved if origin != DEFAULT_ORIGIN and not origin.startswith(IMPLIED)}
    labels = [INLINE_LABEL if origin == INLINE_ORIGIN else origin for origin in involved]
    raise ConfigError(f"{' with '.join(labels)}: {'; '.join(problem.text for problem in problems)}")


def _plain(value: Any) -> Any:
    return [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, tuple) else value
