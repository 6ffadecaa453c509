# SPDX-License-Identifier: Apache-2.0
"""The plugins that vLLM would load, from the metadata of what is installed alone: no plugin is imported.

vLLM takes what `importlib.metadata.entry_points` gives it, which is one distribution of each name, and keeps one plugin
of each name: what is there twice is silently one of the two. What cannot be imported is a logged exception, no more.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import all_suffixes
from pathlib import Path

from vllm_pdmux.activation import KEY
from vllm_pdmux.cli.checks import ERROR, OK, WARNING, Finding
from vllm_pdmux.config_errors import one_line

GENERAL, PLATFORM, ENDPOINT = "vllm.general_plugins", "vllm.platform_plugins", "vllm.endpoint_plugins"
VARIABLE = "VLLM_PLUGINS"
_OURS = "vllm-pdmux"
_METADATA, _ENTRY_POINTS = "METADATA", "entry_points.txt"


@dataclass(frozen=True)
class Plugin:
    """An entry point of one of vLLM's groups."""

    group: str
    name: str
    value: str  # "module:attribute"
    distribution: str  # in the form in which two spellings of a name are equal
    version: str
    folder: str  # that the distribution's metadata lies in
    unreadable: str | None = None  # why the file `name` of the distribution cannot be read; it is then of no group

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()

    def describe(self) -> str:
        """One line: what it is and where it comes from."""
        line = f"{self.name} = {self.value}, of {self.distribution} {self.version} in {self.folder}"
        places = _places(self.module.partition(".")[0])
        elsewhere = [str(place) for place in places if not place.is_relative_to(self.folder)]
        return f"{line}, its code in {', '.join(elsewhere)}" if elsewhere else line


def found_plugins(distributions: Iterable[metadata.Distribution] | None = None) -> list[Plugin]:
    """Those of every distribution on the path, also of such as another one of the same name hides; in its order."""
    found: list[Plugin] = []
    for one in metadata.distributions() if distributions is None else distributions:
        found += _plugins_of(one)
    return list(dict.fromkeys(found))  # a folder may be on the path twice


def _plugins_of(one: metadata.Distribution) -> Iterator[Plugin]:
    """Those of one distribution, and its files that cannot be read. With which exception depends on Python's version,
    and whatever it is, the other distributions are still looked at."""
    folder = str(Path(str(one.locate_file(""))).absolute())
    info = Path(str(getattr(one, "_path", folder)))  # which has no public name
    try:
        name, version, why = one.metadata["Name"], one.metadata["Version"], "missing or without a name"
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a file of another project is a finding
        name, version, why = "", "", str(error)
    if not name:
        yield Plugin("", _METADATA, "", info.name, "", str(info), why)
        name, _, version = info.stem.partition("-")  # that of the folder is the one that importlib.metadata goes by
    name = re.sub(r"[-_.]+", "-", name).lower()
    try:
        entries = [entry for entry in one.entry_points if entry.group.startswith("vllm.")]
    except Exception as error:  # noqa: BLE001 - likewise
        yield Plugin("", _ENTRY_POINTS, "", info.name, "", str(info), str(error))
        return
    yield from (Plugin(entry.group, entry.name, entry.value, name, version, folder) for entry in entries)


def check_plugins(plugins: Sequence[Plugin], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every entry point, what is wrong with it, and whether VLLM_PLUGINS hides it."""
    allowed = allowed_names(environ)
    yield from (_unreadable(plugin) for plugin in plugins if plugin.unreadable is not None)
    plugins = [plugin for plugin in plugins if plugin.unreadable is None]
    for plugin in plugins:
        yield _finding(plugin, plugins, allowed, environ.get(VARIABLE))
    if not any(plugin.name == KEY and plugin.distribution == _OURS for plugin in plugins):
        yield Finding("plugin", ERROR, f"vLLM would not find {KEY} in {GENERAL}: pip install {_OURS} here")
    yield from _variable(plugins, allowed, environ.get(VARIABLE))


def allowed_names(environ: Mapping[str, str]) -> list[str] | None:
    """The names in VLLM_PLUGINS; None: it is not set, and vLLM loads every plugin but those of endpoints."""
    value = environ.get(VARIABLE)
    return None if value is None else value.split(",")


def is_hidden(plugin: Plugin, allowed: Sequence[str] | None) -> bool:
    """Whether vLLM leaves the plugin out for the want of its name in VLLM_PLUGINS."""
    return plugin.group == ENDPOINT if allowed is None else plugin.name not in allowed


def _unreadable(plugin: Plugin) -> Finding:
    says = f"{plugin.folder}: its {plugin.name} cannot be read ({one_line(plugin.unreadable or '')})"
    remedy = "install the distribution again, or remove that folder"
    if plugin.name == _ENTRY_POINTS:
        return Finding("distribution", ERROR, f"{says}, and vLLM, which reads all of them, does not start: {remedy}")
    return Finding("distribution", WARNING, f"{says}: {remedy}")


def _finding(plugin: Plugin, plugins: Sequence[Plugin], allowed: Sequence[str] | None, value: str | None) -> Finding:
    where = f"plugin, {plugin.group.removeprefix('vllm.')}"
    problems = [*_stale(plugin), *_twice(plugin, plugins)]
    if problems:
        return Finding(where, ERROR, "; ".join([plugin.describe(), *problems]))
    if is_hidden(plugin, allowed):
        if plugin.name == KEY and plugin.distribution == _OURS:
            why = f"{VARIABLE}={value!r} hides it from vLLM: add {KEY} to {VARIABLE} or unset it"
            return Finding(where, ERROR, f"{plugin.describe()}; {why}")
        return Finding(where, OK, f"{plugin.describe()}; not loaded: it is not named in {VARIABLE}")
    return Finding(where, OK, plugin.describe())


def _stale(plugin: Plugin) -> Iterator[str]:
    if not _is_there(plugin.module):
        yield (
            f"stale: its module {plugin.module} is gone, and every process of vLLM logs an exception: "
            f"pip uninstall {plugin.distribution}, or remove its metadata from that folder"
        )


def _twice(plugin: Plugin, plugins: Sequence[Plugin]) -> Iterator[str]:
    """The same name again: from another distribution, or from another copy of this one that says something else.

    A clone that is installed as editable is found twice when it is the current folder too, which is no problem."""
    for other in plugins:
        if other is plugin or (other.group, other.name) != (plugin.group, plugin.name):
            continue
        if other.distribution != plugin.distribution:
            yield (
                f"duplicate: {other.distribution} in {other.folder} gives the same name, and vLLM keeps one of them: "
                f"pip uninstall {other.distribution} or {plugin.distribution}"
            )
        elif (other.version, other.value) != (plugin.version, plugin.value):
            yield (
                f"duplicate: {other.distribution} {other.version} in {other.folder} is another copy: "
                f"pip uninstall {plugin.distribution} until none is left, and install it again"
            )


def _is_there(module: str) -> bool:
    """Whether a module can be found, without an import of it or of its package."""
    top, *rest = module.split(".")
    found = _places(top)
    for name in rest:
        found = [path for place in found for path in (*place.glob(name), *place.glob(f"{name}.*"))]
    # A folder with nothing to import in it is what an uninstallation may leave behind.
    return any(path.is_file() or any(path.glob(f"*{suffix}")) for path in found for suffix in all_suffixes())


def _places(top: str) -> list[Path]:
    """The folders of a package or the file of a module; none where it cannot be found."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(place) for place in spec.submodule_search_locations]
    return [] if spec.origin is None else [Path(spec.origin)]


def _variable(plugins: Sequence[Plugin], allowed: Sequence[str] | None, value: str | None) -> Iterator[Finding]:
    if allowed is None:
        yield Finding(VARIABLE, OK, "not set: vLLM loads every plugin but those of endpoints")
        return
    hidden = sorted({plugin.name for plugin in plugins if is_hidden(plugin, allowed)})
    known = {plugin.name for plugin in plugins}
    detail = f"{value!r} hides {', '.join(hidden) or 'nothing'}"
    unknown = [repr(name) for name in allowed if name not in known]
    if unknown:
        detail += f"; no plugin is named {', '.join(unknown)}: correct or remove it"
    yield Finding(VARIABLE, WARNING if unknown else OK, detail)
