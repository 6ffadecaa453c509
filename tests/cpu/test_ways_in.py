# SPDX-License-Identifier: Apache-2.0
"""The ways to ask for the plugin, and to give it settings: each ends in the same engine, and says so once."""

import json
import re
from types import SimpleNamespace

import pytest
from process_helpers import SCHEDULER, STOCK_SCHEDULER, STOCK_WORKER, WORKER, resolve, run_engine

from vllm_pdmux.activation import asked_by

ASKED = {"scheduler_cls": "vllm_pdmux.Scheduler"}
WAYS = {  # what asks, as the log names it: engine arguments, environment
    "--scheduler-cls vllm_pdmux.Scheduler": (ASKED, {}),
    "additional_config['pdmux']": ({"additional_config": {"pdmux": {}}}, {}),
    "PDMUX=1": ({}, {"PDMUX": "1"}),
}
ACTIVE, SETTINGS = "PD-multiplexing is active", "PD-multiplexing settings: "
CHANGED, WORKER_LINE = "PD-multiplexing changed vLLM's ", "PD-multiplexing worker: "


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return request.param, resolve(*WAYS[request.param])


@pytest.fixture(scope="module")
def stock():
    return resolve()


def settings_line(resolved):
    assert not resolved.error
    (line,) = resolved.log_lines(SETTINGS)
    return line.partition(SETTINGS)[2]


def test_each_way_ends_in_our_worker_and_scheduler(way):
    _, resolved = way
    assert (resolved.worker, resolved.scheduler) == (WORKER, SCHEDULER), resolved.error


def test_the_log_says_once_what_asked_and_what_changed(way):
    reason, resolved = way
    (active,) = resolved.log_lines(ACTIVE)
    assert f"asked for by {reason}: scheduler vllm_pdmux.Scheduler (synchronous)" in active
    assert f"worker {WORKER} instead of {STOCK_WORKER}" in active
    assert settings_line(resolved) == "all defaults"


def test_the_log_says_each_setting_of_vllms_that_was_changed_and_why(way):
    """All that `test_nothing_but_worker_and_scheduler_changes` finds, where it was not asked for by name."""
    reason, resolved = way
    expected = [f"parallel_config.worker_cls from {STOCK_WORKER} to {WORKER}: it has the prefill lane"]
    if not reason.startswith("--scheduler-cls"):
        why = "it lets the prefill lane run beside decode steps"
        expected.append(f"scheduler_config.scheduler_cls from None to vllm_pdmux.Scheduler: {why}")
    assert [line.partition(CHANGED)[2] for line in resolved.log_lines(CHANGED)] == expected


def test_checking_the_configuration_or_a_copy_again_changes_nothing(way):
    _, resolved = way
    assert resolved.checked_again == [[WORKER, "vllm_pdmux.Scheduler"]] * 3


def test_nothing_but_worker_and_scheduler_changes(way, stock):
    before, after = stock.settings, way[1].settings
    differs = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed = {name for name in differs if not re.search("additional_config|_supports_multimodal_inputs_cache", name)}
    assert changed == {"config.parallel_config.worker_cls", "config.scheduler_config.scheduler_cls"}


@pytest.mark.parametrize("value", ["1", "true", "on", "YES", " 1 "])
def test_pdmux_may_be_switched_on_with_other_words(value):
    assert asked_by(not_asking(), {"PDMUX": value}) == f"PDMUX={value}"


@pytest.mark.parametrize("value", ["0", "false", "off", "No", ""])
def test_pdmux_switched_off_asks_for_nothing(value):
    assert asked_by(not_asking(), {"PDMUX": value}) is None


@pytest.mark.parametrize("environ", [{}, {"PDMUX": "1"}], ids=["alone", "over PDMUX=1"])
def test_enabled_false_leaves_vllm_as_it_is(environ):
    resolved = resolve({"additional_config": {"pdmux": {"enabled": False}}}, environ)
    assert (resolved.worker, resolved.scheduler) == (STOCK_WORKER, STOCK_SCHEDULER)
    assert not resolved.log_lines("PD-multiplexing")


def test_enabled_false_in_the_file_switches_off_what_the_environment_asks_for(tmp_path):
    path = written(tmp_path / "off.yml", "enabled: false")
    assert resolve(environ={"PDMUX": "1", "PDMUX_CONFIG": path}).worker == STOCK_WORKER


def test_settings_in_the_file_of_the_environment(tmp_path):
    path = written(tmp_path / "pdmux.yml", "layers_per_group: 3")
    resolved = resolve(ASKED, {"PDMUX_CONFIG": path})
    assert settings_line(resolved) == f"layers_per_group=3 (file {path} (PDMUX_CONFIG))"


def test_settings_in_the_file_that_the_inline_settings_name(tmp_path):
    path = written(tmp_path / "pdmux.yml", "layers_per_group: 4")
    resolved = resolve({"additional_config": {"pdmux": {"config": path}}})
    assert settings_line(resolved) == f"layers_per_group=4 (file {path})"


def test_settings_from_everywhere_are_logged_each_with_its_origin(tmp_path):
    of_environment = written(tmp_path / "environment.yml", "layers_per_group: 3\ntrace_steps: 9\nlane: serial")
    named = written(tmp_path / "named.yml", "layers_per_group: 4\nlane: threaded")
    inline = {"config": named, "layers_per_group": 5, "lane": "serial"}
    resolved = resolve(ASKED | {"additional_config": {"pdmux": inline}}, {"PDMUX_CONFIG": of_environment})
    assert settings_line(resolved) == (
        f"layers_per_group=5 (additional_config), lane=serial (additional_config), "
        f"trace_steps=9 (file {of_environment} (PDMUX_CONFIG))"
    )


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_started_with_the_scheduler_class_answers():
    run = run_engine("The capital of France is", ASKED | {"distributed_executor_backend": "uni"}, {})
    assert run.returncode == 0, run.stdout
    answers = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert json.loads(answers[0].removeprefix("ANSWER ")).startswith(" Paris"), run.stdout
    assert f"{WORKER_LINE}PDMuxCPUWorker, Model Runner V1, lane threaded\n" in run.stdout
    for said_once in (ACTIVE, SETTINGS, CHANGED, "PD-multiplexing scheduler: ", WORKER_LINE):
        assert run.stdout.count(said_once) == 1, run.stdout


def not_asking():
    return SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None), additional_config={})


def written(path, text):
    path.write_text(text + "\n")
    return str(path)
