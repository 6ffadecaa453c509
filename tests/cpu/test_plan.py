# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux plan`: the answer of the policy on any machine, and one line for anything wrong."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_pdmux.cli import main
from vllm_pdmux.simulator.profile import MOST_BYTES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_pdmux"


@pytest.fixture(autouse=True)
def no_environment_file(monkeypatch):
    monkeypatch.delenv("PDMUX_CONFIG", raising=False)


def run_module(*arguments, **environment):
    """The command line in a process of its own, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_pdmux", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def plan_json(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_group_for_a_load(capsys):
    answer = plan_json(capsys, "--sms", "132", "--decode-batch", "12")
    assert answer == {"group": 2, "prefill_sms": 104, "decode_sms": 28}


@pytest.mark.parametrize(
    "decode_batch, prefill_tokens, group, layers",
    [("12", "8192", 2, 4), ("0", "8192", 0, 32), ("12", "0", 7, 0), ("400", "1", 6, 4)],
)
def test_layers_are_those_that_one_step_advances(capsys, decode_batch, prefill_tokens, group, layers):
    load = ["--decode-batch", decode_batch, "--prefill-tokens", prefill_tokens, "--layers", "32"]
    answer = plan_json(capsys, "--sms", "132", *load)
    assert (answer["group"], answer["layers"]) == (group, layers)


def test_without_a_load_all_groups(capsys):
    groups = plan_json(capsys, "--sms", "108", "--compute-capability", "8.0")["groups"]
    assert [group["group"] for group in groups] == list(range(8))
    common = {"min_decode_batch": None, "sharing": "capped"}
    assert groups[0] == {"group": 0, "prefill_sms": 108, "decode_sms": 0} | common
    assert groups[1] == {"group": 1, "prefill_sms": 84, "decode_sms": 24} | common


@pytest.mark.parametrize("dotted, plain", [("9.0", "90"), ("8.6", "86"), ("10.3", "103"), ("12.0", "120")])
def test_a_compute_capability_is_written_with_or_without_the_dot(capsys, dotted, plain):
    answers = [plan_json(capsys, "--sms", "132", "--compute-capability", text) for text in (dotted, plain)]
    assert answers[0] == answers[1]


def test_the_table_marks_the_chosen_group(capsys):
    assert main(["plan", "--sms", "132", "--decode-batch", "12", "--layers", "32"]) == 0
    output = capsys.readouterr().out
    (marked,) = [line for line in output.splitlines() if ">" in line.split("decode batch")[0]]
    assert {"2", "104", "28"} <= set(marked.split())
    assert "settings: all defaults" in output
    assert "layers of the prefill in each step: 4" in output


def test_the_table_says_when_the_device_has_fewer_splits_than_asked_for(capsys):
    assert main(["plan", "--sms", "78"]) == 0
    assert "only 3 of the 6 automatic splits" in capsys.readouterr().out


def test_a_file_by_option_or_environment(capsys, tmp_path, monkeypatch):
    path = tmp_path / "pdmux.yml"
    path.write_text("sm_group_num: 4\nmanual_divisions: [[64, 68, 10], [112, 20, 5]]")
    expected = {"group": 1, "prefill_sms": 64, "decode_sms": 68}
    assert plan_json(capsys, "--sms", "132", "--decode-batch", "12", "--config", str(path)) == expected
    monkeypatch.setenv("PDMUX_CONFIG", str(path))
    assert plan_json(capsys, "--sms", "132", "--decode-batch", "12") == expected
    assert plan_json(capsys, "--sms", "132")["groups"][2]["min_decode_batch"] == 5


MEASURED = ROOT / "benchmarks" / "results" / "profile-h200-llama-8b.json"
ITS_DIVISIONS = "sm_group_num: 4\nmanual_divisions: [[100, 32, 0], [84, 48, 8]]\nsharing: [capped, disjoint]\n"


@pytest.fixture
def model(tmp_path):
    """The folder of a model with this config."""

    def write(config):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(folder)

    return write


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 30}, {"n_layer": 30}, {"text_config": {"num_hidden_layers": 30}, "n_layer": None}]
)
def test_a_model_has_its_layer_groups(capsys, model, config):
    answer = plan_json(capsys, "--sms", "132", "--model", model(config))
    assert answer["model_layers"] == 30 and len(answer["groups"]) == 8
    assert answer["layer_groups"] == [[0, 4], [4, 8], [8, 12], [12, 16], [16, 20], [20, 24], [24, 28], [28, 30]]


@pytest.mark.parametrize(
    "settings, load, groups",
    [
        ("layers_per_group: 20", [], [[0, 20], [20, 30]]),
        ("sm_group_num: 8\nsplit_forward_token_budget: 65536", ["--prefill-tokens", "4096"], [[0, 16], [16, 30]]),
        ("sm_group_num: 8\nsplit_forward_token_budget: 65536", [], [[0, 8], [8, 16], [16, 24], [24, 30]]),
        ("layers_per_group: 20", ["--decode-batch", "0"], [[0, 30]]),
        ("layers_per_group: 20", ["--decode-batch", "3", "--prefill-tokens", "0"], []),
        ("lane: serial", [], [[0, 30]]),
        ("itl_slo_ms: 25", [], None),
    ],
)
def test_layer_groups_are_those_of_the_settings_and_the_load(capsys, model, tmp_path, settings, load, groups):
    (tmp_path / "pdmux.yml").write_text(settings)
    asked = ["--sms", "132", "--model", model({"num_hidden_layers": 30}), "--config", str(tmp_path / "pdmux.yml")]
    assert plan_json(capsys, *asked, *load)["layer_groups"] == groups
    assert main(["plan", *asked, *load]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layer groups of the model's")]
    shown = "none" if groups == [] else ", ".join(f"{first}-{end - 1}" for first, end in groups or ())
    assert line.endswith(shown or "policy slo chooses them while it serves")


def test_a_model_with_a_load_has_the_group_and_the_layers_of_one_step_too(capsys, model):
    answer = plan_json(capsys, "--sms", "132", "--model", model({"num_hidden_layers": 30}), "--decode-batch", "12")
    assert (answer["group"], answer["layers"], answer["layer_groups"][-1]) == (2, 4, [28, 30])


def test_a_profile_predicts_each_division_that_it_knows(capsys, tmp_path):
    (tmp_path / "pdmux.yml").write_text(ITS_DIVISIONS)
    asked = ["--sms", "132", "--config", str(tmp_path / "pdmux.yml"), "--profile", str(MEASURED)]
    alone, capped, disjoint, decode = plan_json(capsys, *asked)["predicted"]
    assert alone["itl_ms"] is None and decode["prefill_ms"] is None
    # As measured for 32 requests at 2,048 tokens and prompts of 8,192, in the first table of docs/measured.md.
    assert decode["itl_ms"] == pytest.approx(7.0, rel=0.03)
    assert capped["itl_ms"] == pytest.approx(12.6, rel=0.1) and disjoint["itl_ms"] == pytest.approx(12.7, rel=0.1)
    assert 8192 / capped["prefill_ms"] * 1e3 == pytest.approx(21823, rel=0.1)
    assert alone["prefill_ms"] < disjoint["prefill_ms"]
    more = plan_json(capsys, *asked, "--decode-batch", "128", "--context-tokens", "4096")["predicted"]
    assert more[1]["itl_ms"] > capped["itl_ms"] and more[0] == alone
    assert (
        plan_json(capsys, *asked, "--prefill-tokens", "4096")["predicted"][0]["prefill_ms"] < alone["prefill_ms"] / 1.9
    )
    nothing = plan_json(capsys, *asked, "--decode-batch", "0")["predicted"]
    assert [one["itl_ms"] for one in nothing] == [None] * 4 and nothing[1]["prefill_ms"] is None


def test_people_get_the_predictions_and_which_divisions_have_none(capsys, tmp_path):
    (tmp_path / "pdmux.yml").write_text(
        "sm_group_num: 4\nmanual_divisions: [[100, 32, 0], [112, 20, 8]]\nitl_slo_ms: 15"
    )
    asked = ["--sms", "132", "--config", str(tmp_path / "pdmux.yml"), "--profile", str(MEASURED)]
    assert main(["plan", *asked, "--decode-batch", "32"]) == 0
    said = capsys.readouterr().out
    assert "ITL ms" in said and "the profile does not know group 2: " in said


def test_a_policy_that_learns_has_no_answer_for_a_load(capsys, tmp_path):
    path = tmp_path / "pdmux.yml"
    path.write_text("itl_slo_ms: 25")
    for load in (["--decode-batch", "3"], ["--layers", "32"]):
        assert main(["plan", "--sms", "132", "--config", str(path), *load]) == 2
        said = capsys.readouterr().err
        assert f"{load[0]}: policy slo decides by measured steps" in said and "or give --profile" in said


@pytest.mark.parametrize(
    "sharing, expected",
    [("disjoint", ["disjoint", "disjoint"]), ("[disjoint, capped]", ["disjoint", "capped"])],
)
def test_each_division_says_how_the_lanes_share(capsys, tmp_path, sharing, expected):
    path = tmp_path / "pdmux.yml"
    path.write_text(f"sm_group_num: 4\nsharing: {sharing}")
    groups = plan_json(capsys, "--sms", "132", "--config", str(path))["groups"]
    assert [group["sharing"] for group in groups[1:-1]] == expected
    assert main(["plan", "--sms", "132", "--config", str(path)]) == 0
    table = capsys.readouterr().out.partition("settings:")[0]
    assert table.count("disjoint") == expected.count("disjoint")
    assert table.count("of its own, all") == expected.count("capped")


@pytest.mark.parametrize(
    "policy",
    [
        "policy: fixed\nfixed_group: 3",
        "sm_group_num: 3\nmanual_divisions: [[66, 66, 5]]",
        "itl_slo_ms: 25",
        "policy: off",
    ],
)
def test_every_policy_has_a_table(capsys, tmp_path, policy):
    path = tmp_path / "pdmux.yml"
    path.write_text(policy)
    assert main(["plan", "--sms", "132", "--config", str(path)]) == 0
    assert ("both lanes busy" in capsys.readouterr().out) == ("fixed" in policy)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "--sms"),
        (["--sms", "0"], "argument --sms: is '0' but must be an integer, at least 1"),
        (["--sms", "132", "--decode-batch", "-1"], "--decode-batch: is '-1'"),
        (["--sms", "132", "--decode-batch", "x\ny"], "--decode-batch: is"),
        (["--sms", "132", "--compute-capability", "hopper"], "--compute-capability: is 'hopper'"),
        (["--sms", "132", "--compute-capability", "7.5"], "compute capability 7.5 is below 8.0, which SM partitions"),
        (["--sms", "20"], "20 SMs have none"),
        (["--sms", "132", "--layers", "32"], "add --decode-batch"),
        (["--sms", "132", "--no-such-option"], "--no-such-option"),
        (["--sms", "132", "--config", "no\nsuch.yml"], "cannot be read"),
        (["--sms", "132", "--config", ""], "config is ''"),
        (["--sms", "132", "--model", "/no/such"], "--model is '/no/such' but /no/such/config.json cannot be read (No"),
        (["--sms", "132", "--model", "m", "--layers", "3", "--decode-batch", "1"], "--model says it too"),
        (["--sms", "132", "--profile", "/no/such.json"], "profile /no/such.json: cannot be read"),
        (["--sms", "132", "--context-tokens", "3"], "--context-tokens is 3 but only a profile uses it"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, arguments, expected):
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllm-pdmux plan: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    "config, expected",
    [
        ("{", "cannot be read"),
        ("[]", "has none of"),
        ({"n_layer": 0}, "num_hid"),
        ("[" * 100_000, "cannot be read (maximum recursion depth exceeded"),
        ('{"n_layer": 3}'.ljust(MOST_BYTES + 1), f"cannot be read (is larger than {MOST_BYTES} bytes)"),
    ],
    ids=["no JSON", "no mapping", "no layers", "nested", "large"],
)
def test_a_model_whose_layers_are_not_said_is_one_line(capsys, model, config, expected):
    assert main(["plan", "--sms", "132", "--model", model(config)]) == 2
    err = capsys.readouterr().err
    assert expected in err and "--layers" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["--no-such-option"]])
def test_a_missing_or_unknown_command_is_one_line_and_exit_code_2(capsys, arguments):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_who_has_seen_enough_gets_no_message(form):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vllm_pdmux", "plan", "--sms", "132", *form]
    with os.fdopen(writing, "w") as nobody_reads:
        done = subprocess.run(command, cwd=ROOT, stdout=nobody_reads, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert {"plan", "config", "demo", "verify", "calibrate", "doctor", "simulate"} <= set(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("sm_group_num: 2", "at least 3"),
        ("sm_group_num: [8", "not YAML"),
        ("sm_group_num: 3\nmanual_divisions: [[112, 28, 1]]", "the device has 132, so 8 do not exist"),
        ("sm_group_num: 3\nmanual_divisions: [[112, 12, 1]]", "the device has 132, so 8 would be left idle"),
        ("policy: fixed\nfixed_group: 6\ntrace_steps: -1", "trace_steps is -1"),
        ("sharing: both", "sharing is 'both' (a string) but must be 'capped' or 'disjoint'"),
        ("sharing: [capped]", "sharing lists 1 but sm_group_num 8 needs 6"),
    ],
)
def test_a_bad_file_is_one_line_without_a_traceback(tmp_path, text, expected):
    path = tmp_path / "pdmux.yml"
    path.write_text(text)
    done = run_module("plan", "--sms", "132", "--config", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vllm-pdmux plan: file {path}: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_the_environment_file_is_named_as_such(tmp_path):
    done = run_module("plan", "--sms", "132", PDMUX_CONFIG=str(tmp_path / "none.yml"))
    assert done.returncode == 2
    assert "none.yml (PDMUX_CONFIG): cannot be read" in done.stderr


def test_planning_imports_neither_vllm_nor_torch_nor_another_command():
    code = (
        "import sys; from vllm_pdmux.cli import main; main(['plan', '--sms', '132']); "
        "print(sorted({'vllm', 'torch', 'vllm_pdmux.cli.demo'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def imports(path):
    """The modules that a file imports anywhere in it, lazily or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize(
    "files, forbidden",
    [
        ("spatial/groups.py", ["vllm_pdmux.policy", "vllm_pdmux.config"]),
        ("spatial/granted.py", ["vllm_pdmux.policy", "vllm_pdmux.config"]),
        ("spatial/partition.py", ["vllm_pdmux.policy", "vllm_pdmux.config"]),
        ("policy/*.py", ["vllm_pdmux.spatial", "vllm_pdmux.config", "vllm_pdmux.simulator", "vllm_pdmux.calibration"]),
        ("calibration/[fps]*.py", ["vllm_pdmux.scheduler", "vllm_pdmux.worker", "vllm_pdmux.config"]),
        ("calibration/cache.py", ["vllm_pdmux.scheduler", "vllm_pdmux.worker", "vllm_pdmux.config"]),
        ("config*.py", ["vllm_pdmux.spatial", "vllm_pdmux.policy"]),
        ("policy_from_config.py", ["vllm_pdmux.spatial"]),
        ("cli/plan.py", []),
    ],
)
def test_policy_spatial_and_configuration_know_nothing_of_each_other(files, forbidden):
    paths = list(PACKAGE.glob(files))
    assert paths
    for path in paths:
        for name in imports(path):
            assert name.split(".")[0] not in ("vllm", "torch"), f"{path} imports {name}"
            assert not name.startswith(tuple(forbidden)), f"{path} imports {name}"


def test_a_list_of_sharings_may_be_longer_than_what_the_device_has(capsys, tmp_path):
    """A small device has fewer automatic splits than were asked for; those that it has keep their sharing."""
    path = tmp_path / "six.yml"
    path.write_text("sm_group_num: 8\nsharing: [capped, capped, capped, disjoint, disjoint, disjoint]\nitl_slo_ms: 20")
    assert main(["plan", "--sms", "78", "--config", str(path), "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    mixed = [group for group in groups if group["prefill_sms"] and group["decode_sms"]]
    assert len(mixed) < 6 and [group["sharing"] for group in mixed][:3] == ["capped"] * 3


PROFILE = str(Path(__file__).parents[2] / "benchmarks/results/profile-h200-llama-8b.json")


def test_a_load_over_time_is_what_simulate_says_of_it(capsys):
    load = ["--profile", PROFILE, "--rate", "2", "--requests", "20", "--itl-slo-ms", "20", "--json"]
    assert main(["simulate", *load]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["plan", *load]) == 0
    assert json.loads(capsys.readouterr().out) == said and {"slo", "capped 84:48"} <= {
        one["arm"] for one in said["arms"]
    }


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--rate", "2"], "--trace and --rate need the times of a device: give --profile"),
        (["--sms", "132", "--itl-slo-ms", "20"], "--itl-slo-ms: of a load over time: add --trace or --rate"),
        (
            ["--profile", PROFILE, "--rate", "2", "--sms", "132"],
            "--sms: not with a load over time, which the divisions of --profile serve",
        ),
        ([], "--sms is not given: give the SMs of the device"),
    ],
)
def test_a_load_and_a_load_over_time_are_two_questions(capsys, arguments, problem):
    assert main(["plan", *arguments]) == 2
    assert problem in capsys.readouterr().err
