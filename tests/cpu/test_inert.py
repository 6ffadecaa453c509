# SPDX-License-Identifier: Apache-2.0
"""Installed but not asked for, the plugin changes nothing: what vLLM resolves and prints is as without it."""

import pytest
from process_helpers import STOCK_SCHEDULER, STOCK_WORKER, resolve, resolve_afresh

NOT_ASKED = {
    "a settings file alone": {"PDMUX_CONFIG": "{settings}"},
    "a settings file that does not exist": {"PDMUX_CONFIG": "/no/such/file.yml"},
    "PDMUX=0": {"PDMUX": "0"},
    "PDMUX=": {"PDMUX": ""},
    "left out of VLLM_PLUGINS": {"VLLM_PLUGINS": "another", "PDMUX": "1"},
}

UNUSED_FILE = "PDMUX_CONFIG is set but nothing asks for pdmux: set PDMUX=1 to use it, or unset it"


@pytest.fixture(scope="module")
def without():
    """vLLM as if this project were not installed."""
    return resolve_afresh(hide_plugin=True)


@pytest.fixture(scope="module")
def installed():
    return resolve_afresh()


def test_the_comparison_is_between_with_and_without(without, installed):
    assert not [name for name in without.modules if name.startswith("vllm_pdmux")]
    assert "vllm_pdmux.plugin" in installed.modules
    assert len(without.settings) > 300 and without.log and not without.error


def test_every_resolved_setting_is_the_same(without, installed):
    assert installed.settings == without.settings


def test_the_classes_are_stock(without, installed):
    assert installed.worker == without.worker == STOCK_WORKER
    assert installed.scheduler == without.scheduler == STOCK_SCHEDULER
    assert installed.platform == without.platform == "vllm.platforms.cpu.CpuPlatform"
    assert installed.checked_again == without.checked_again == [[STOCK_WORKER, None]] * 3


def test_the_log_is_the_same(without, installed):
    assert installed.log == without.log


def test_the_environment_is_the_same(without, installed):
    assert installed.environ == without.environ


def test_no_other_module_of_vllm_is_imported(without, installed):
    assert [name for name in installed.modules if not name.startswith("vllm_pdmux")] == without.modules


def test_what_serves_requests_is_not_imported(installed):
    serving = ("vllm_pdmux.scheduler", "vllm_pdmux.worker", "vllm_pdmux.internals")
    assert not [name for name in installed.modules if name.startswith(serving)]


@pytest.mark.parametrize("environ", NOT_ASKED.values(), ids=NOT_ASKED)
def test_a_variable_that_does_not_ask_changes_no_setting(environ, without, tmp_path):
    resolved = resolve(environ=filled_in(environ, tmp_path))
    assert resolved.settings == without.settings
    assert (resolved.worker, resolved.scheduler) == (STOCK_WORKER, STOCK_SCHEDULER)
    stock_log = "\n".join(line for line in resolved.log.splitlines() if UNUSED_FILE not in line)
    assert stock_log and without.log.rstrip().endswith(stock_log)  # without what the import prints


@pytest.mark.parametrize(
    "environ, warnings",
    [({"PDMUX_CONFIG": "{settings}"}, 1), ({"PDMUX_CONFIG": "{settings}", "PDMUX": "0"}, 0), ({"PDMUX_CONFIG": ""}, 0)],
    ids=["nothing asks", "switched off", "no file"],
)
def test_a_settings_file_that_nothing_uses_is_worth_one_warning(environ, warnings, tmp_path):
    resolved = resolve(environ=filled_in(environ, tmp_path))
    assert len(resolved.log_lines(UNUSED_FILE)) == warnings
    assert len(resolved.checked_again) == 3, "the configuration was checked several times"


def filled_in(environ, folder):
    settings = folder / "pdmux.yml"
    settings.write_text("layers_per_group: 2\n")
    return {name: value.format(settings=settings) for name, value in environ.items()}
