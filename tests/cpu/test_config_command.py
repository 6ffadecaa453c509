# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux config`: every setting, its value and where that is from; a schema that means what the reader does."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from vllm_pdmux.cli import main
from vllm_pdmux.config import PDMuxConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_environment_file(monkeypatch):
    monkeypatch.delenv("PDMUX_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path):
    def write(text, name="pdmux.yml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def shown(capsys, *arguments):
    assert main(["config", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["settings"]


def test_without_a_file_every_setting_is_a_default(capsys):
    found = shown(capsys)
    assert list(found) == list(PDMuxConfig.model_fields)
    assert {row["origin"] for row in found.values()} == {"default"}
    assert found["sm_group_num"]["value"] == 8 and found["itl_slo_ms"]["value"] is None


def test_each_value_has_the_origin_that_won(capsys, file, monkeypatch):
    environment = file("trace_steps: 3\nlane: serial\nitl_slo_ms: 25", "environment.yml")
    given = file("lane: threaded", "given.yml")
    monkeypatch.setenv("PDMUX_CONFIG", environment)
    found = shown(capsys, "--file", given)
    assert found["lane"] == {"value": "threaded", "origin": f"file {given}"}
    assert found["trace_steps"] == {"value": 3, "origin": f"file {environment} (PDMUX_CONFIG)"}
    assert found["policy"] == {"value": "slo", "origin": "implied by itl_slo_ms"}
    assert found["backend"]["origin"] == "default"


def test_a_file_of_the_values_gives_the_same_settings_again(capsys, file):
    path = file("sm_group_num: 4\nmanual_divisions: [[84, 48, 1], [64, 68, 9]]\nsharing: [capped, disjoint]")
    before = {name: row["value"] for name, row in shown(capsys, "--file", path).items()}
    assert before["manual_divisions"] == [[84, 48, 1], [64, 68, 9]]
    again = file(json.dumps({name: value for name, value in before.items() if value is not None}), "again.json")
    assert {name: row["value"] for name, row in shown(capsys, "--file", again).items()} == before


def test_people_get_a_table(capsys, file):
    path = file("layers_per_group: 3", "a[b]c.yml")  # no markup
    assert main(["config", "--file", path]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "layers_per_group" in line]
    assert line.split("│")[2].strip() == "3" and "file" in line.split("│")[3]


def test_a_long_path_is_not_cut_off(capsys, file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = file("layers_per_group: 3", "a" * 150 + ".yml")
    assert main(["config", "--file", path]) == 0
    cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert f"file{path}" in "".join(row[3].strip() for row in cells).replace(" ", "")


@pytest.mark.parametrize(
    ("switch", "said"), [("1", "PDMUX=1 asks for the plugin."), ("0", "They hold where the plugin is asked for")]
)
def test_it_says_whether_they_are_in_use(capsys, monkeypatch, switch, said):
    monkeypatch.setenv("PDMUX", switch)
    assert main(["config"]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_switch_that_says_neither_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("PDMUX", "perhaps")
    assert main(["config"]) == 2
    assert "PDMUX='perhaps'" in capsys.readouterr().err


def schema(capsys):
    assert main(["config", "--schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_schema_is_one_and_describes_every_setting(capsys):
    found = schema(capsys)
    jsonschema.validators.validator_for(found).check_schema(found)
    assert list(found["properties"]) == list(PDMuxConfig.model_fields)
    assert all(one["description"] for one in found["properties"].values())


@pytest.mark.parametrize(
    "text, allowed",
    [
        ("sm_group_num: 4\nmanual_divisions: [[84, 48, 1], [64, 68, 9]]\nsharing: [capped, disjoint]", True),
        ("itl_slo_ms: 25.5", True),
        ("layers_per_group: 0", False),
        ("polcy: table", False),
        ("sharing: both", False),
        ("graph_memory_share: 0.6", False),
        ("sm_group_num: 3\nmanual_divisions: [[84, 48]]", False),
    ],
)
def test_the_schema_and_the_reader_agree(capsys, file, text, allowed):
    errors = list(jsonschema.Draft202012Validator(schema(capsys)).iter_errors(yaml.safe_load(text)))
    assert (not errors) == allowed
    assert main(["config", "--file", file(text)]) == (0 if allowed else 2)


def test_a_schema_of_one_file_is_refused(capsys, file):
    assert main(["config", "--schema", "--file", file("lane: serial")]) == 2
    assert "leave one of the two out" in capsys.readouterr().err


def test_it_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from vllm_pdmux.cli import main; main(['config', '--json']); main(['config', '--schema']); "
        "print(sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
