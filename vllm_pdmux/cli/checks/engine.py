# SPDX-License-Identifier: Apache-2.0
"""What only vLLM itself can say: the platform that it chooses, and what of a model's configuration is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_pdmux.activation import KEY, SCHEDULER, ActivationError, asked, inline_settings, is_ours, metadata_version
from vllm_pdmux.cli.checks import ERROR, OK, WARNING, Finding
from vllm_pdmux.cli.checks.plugins import PLATFORM, Plugin, allowed_names, is_hidden
from vllm_pdmux.cli.engine_options import refusals
from vllm_pdmux.config import ConfigError, Resolved
from vllm_pdmux.support import REFUSALS, problems, settings_problems, version_problems
from vllm_pdmux.switch import is_on

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_TARGET = "VLLM_TARGET_DEVICE"


def check_platform(plugins: Sequence[Plugin]) -> Iterator[Finding]:
    """The class that vLLM chose and why. Imports vLLM."""
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # noqa: BLE001 - whatever the import of vLLM and of a plugin raises
        yield Finding("platform", ERROR, f"vLLM cannot be imported here ({type(error).__name__}: {error})")
        return
    cls = type(current_platform)
    name = f"{cls.__module__}.{cls.__qualname__}"
    allowed = allowed_names(os.environ)
    of_group = [one for one in plugins if one.group == PLATFORM]
    loaded = [one.name for one in of_group if not is_hidden(one, allowed)]
    others = f"platform plugins found: {', '.join(one.describe() for one in of_group) or 'none'}"
    if not cls.__module__.startswith("vllm.platforms."):
        detail = f"{name}, of the platform plugin {' or '.join(loaded)}; {others}: pdmux serves vLLM's own platforms; "
        yield Finding("platform", ERROR, detail + "uninstall the plugin or leave it out of VLLM_PLUGINS")
        return
    if os.environ.get(_TARGET) == "cpu":
        why = f"{_TARGET}=cpu asks for it"
    else:
        why = f"vLLM's own detection, with {' '.join(metadata_version())}"
        why += f"; {', '.join(loaded)} did not claim the device" if loaded else ""
    yield Finding("platform", OK, f"{name}: {why}; {others}")


def check_served(engine_args: EngineArgs, resolved: Resolved, whole: bool) -> Iterator[Finding]:
    """Whether the plugin serves a model with its engine arguments; a line for each feature that is refused.

    The configuration is made as for an engine, without weights. `whole`: these are all that a server would have.
    Raises CommandError when vLLM itself refuses it.
    """
    # Not asked for here: the plugin would end the start with all that is refused in one message.
    additional = engine_args.additional_config if isinstance(engine_args.additional_config, Mapping) else {}
    engine_args.additional_config = {**additional, KEY: {"enabled": False}}
    try:
        is_named = is_ours(engine_args.scheduler_cls)
    except ActivationError:  # said by `check_asked`
        is_named = True
    if is_named:
        engine_args.scheduler_cls = None
    with refusals(engine_args.model):
        config = engine_args.create_engine_config()
    distribution = metadata_version()
    known = version_problems(distribution, os.environ)  # said of the installation already
    found = problems(config, distribution, os.environ) + settings_problems(config, resolved.config)
    refused = [problem for problem in found if problem not in known]
    for problem in refused:
        yield Finding("model", ERROR, problem)
    if not refused:
        model = config.model_config
        detail = (
            f"supported: {engine_args.model} ({model.architecture}, {model.dtype}) uses none of the {len(REFUSALS)}"
        )
        detail += " features that are refused"
        if not whole:
            detail += ", as far as these options say: `vllm-pdmux doctor -- LINE` checks all that follows `vllm serve`"
        yield Finding("model", OK, detail)


def check_asked(engine_args: EngineArgs, environ: Mapping[str, str]) -> Finding:
    """Whether a server with these engine arguments would use the plugin."""
    try:
        inline = inline_settings(engine_args.additional_config)
        reason = asked(engine_args.scheduler_cls, inline, environ)
        is_off = reason is None and (inline is not None or is_on(environ))
    except (ActivationError, ConfigError) as error:
        return Finding("asked for", ERROR, str(error))
    if is_off:
        return Finding("asked for", WARNING, "the setting enabled is false, so stock vLLM serves: set it to true")
    if reason is None:
        detail = f"the line does not ask for the plugin: add --scheduler-cls {SCHEDULER}, or set PDMUX=1"
        return Finding("asked for", WARNING, detail)
    return Finding("asked for", OK, f"by {reason}")
