# SPDX-License-Identifier: Apache-2.0
"""Configuration: SGLang's files mean here what they mean there, and a wrong one is one line with the way out."""

import json
import os
import textwrap

import pytest
from pydantic import ValidationError

from vllm_pdmux.config import ConfigError, PDMuxConfig, resolve

SGLANG_DOCUMENTED = """
    sm_group_num: 8            # group 0 = all SMs prefill, last = all SMs decode, so 6 rows below
    manual_divisions:          # optional; [prefill_sm, decode_sm, decode_bs_threshold]
      - [112, 20, 1]
      - [104, 28, 5]
      - [96, 36, 10]
      - [80, 52, 15]
      - [64, 68, 20]
      - [56, 76, 25]
    decode_bs_divisor: 36      # used only without manual_divisions
    split_forward_token_budget: 65536
"""
SGLANG_LOOGLE = """
    sm_group_num: 5
    manual_divisions:
      - [80, 52, 1]
      - [64, 68, 5]
      - [56, 76, 10]
"""
SGLANG_A100 = """
    sm_group_num: 4
    decode_bs_divisor: 36
    split_forward_token_budget: 65536
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="pdmux.yml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return str(path)

    return write


def error_of(inline, environ=None):
    """The message of the ConfigError, which is always one printable line."""
    with pytest.raises(ConfigError) as raised:
        resolve(inline, environ or {})
    assert str(raised.value).isprintable()
    return str(raised.value)


def test_nothing_given_is_all_defaults():
    resolved = resolve(None, {})
    assert resolved.config == PDMuxConfig() == resolve({}, {"PDMUX_CONFIG": ""}).config
    assert resolved.config.model_dump() == {
        "enabled": True,
        "sm_group_num": 8,
        "manual_divisions": (),
        "sharing": "capped",
        "backend": "auto",
        "decode_bs_divisor": 36,
        "split_forward_token_budget": None,
        "policy": "table",
        "itl_slo_ms": None,
        "prefill_wait_limit_ms": None,
        "itl_limit_ms": None,
        "ttft_slo_ms": None,
        "calibration": "auto",
        "fixed_group": None,
        "layers_per_group": None,
        "max_prefill_tokens": None,
        "graph_memory_share": 0.03,
        "graph_capture_s": 30.0,
        "lane": "threaded",
        "experimental_tensor_parallel": False,
        "trace_steps": 0,
        "trace_file": None,
        "watchdog_s": 120.0,
        "watchdog_action": "log",
    }
    assert set(resolved.origins) == set(PDMuxConfig.model_fields)
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.describe() == "all defaults"


def test_every_field_is_described_and_the_schema_holds_all_of_them():
    assert all(field.description for field in PDMuxConfig.model_fields.values())
    assert set(PDMuxConfig.model_json_schema()["properties"]) == set(PDMuxConfig.model_fields)


def test_the_configuration_is_frozen_and_hashable():
    with pytest.raises(ValidationError):
        PDMuxConfig().sm_group_num = 4
    assert hash(PDMuxConfig()) == hash(PDMuxConfig())


class TestSGLangFiles:
    def test_the_documented_example(self, write):
        config = resolve({"config": write(SGLANG_DOCUMENTED)}, {}).config
        assert config.sm_group_num == 8
        assert config.manual_divisions[0] == (112, 20, 1)
        assert config.manual_divisions[5] == (56, 76, 25)
        assert (config.decode_bs_divisor, config.split_forward_token_budget) == (36, 65536)

    @pytest.mark.parametrize("text, groups, rows", [(SGLANG_LOOGLE, 5, 3), (SGLANG_A100, 4, 0)])
    def test_other_files_in_use(self, write, text, groups, rows):
        config = resolve({"config": write(text)}, {}).config
        assert (config.sm_group_num, len(config.manual_divisions)) == (groups, rows)

    def test_the_token_budget_that_a_file_leaves_out_is_that_of_sglang(self, write):
        path = write("sm_group_num: 8")
        resolved = resolve({"config": path}, {})
        assert resolved.config.split_forward_token_budget == 65536
        assert resolved.origins["split_forward_token_budget"] == f"implied by sm_group_num in file {path}"

    def test_any_source_may_set_another_token_budget(self, write):
        path = write("sm_group_num: 8")
        for budget in (1000, None):
            assert resolve({"config": path, "split_forward_token_budget": budget}, {}).config == PDMuxConfig(
                split_forward_token_budget=budget
            )

    @pytest.mark.parametrize("empty", ["", "null", "[]"])
    def test_no_rows_is_the_automatic_split(self, write, empty):
        config = resolve({"config": write(f"sm_group_num: 5\nmanual_divisions: {empty}")}, {}).config
        assert config.manual_divisions == ()

    def test_json_is_read_too(self, write):
        values = {"sm_group_num": 3, "manual_divisions": [[66, 66, 1]]}
        for indent in (None, 2, "\t"):
            path = write(json.dumps(values, indent=indent), "pdmux.json")
            assert resolve({"config": path}, {}).config.manual_divisions == ((66, 66, 1),)

    @pytest.mark.parametrize("thresholds", [(5, 10), (10, 5), (5, 5), (0, 0)])
    def test_thresholds_may_start_anywhere_and_fall(self, write, thresholds):
        first, second = thresholds
        path = write(f"sm_group_num: 4\nmanual_divisions: [[9, 9, {first}], [8, 8, {second}]]")
        config = resolve({"config": path}, {}).config
        assert [row[2] for row in config.manual_divisions] == [first, second]


# The malformed files of which SGLang accepts some and fails late on others; here each fails at start.
MALFORMED = {
    "sm_group_num missing": (
        "manual_divisions: [[112, 20, 1], [66, 66, 5]]",
        "sm_group_num is missing but must be given, an integer, at least 3, in a file with manual_divisions: "
        "add sm_group_num: 4",
    ),
    "sm_group_num missing, divisor": ("decode_bs_divisor: 8\nlane: serial", "sm_group_num is missing"),
    "sm_group_num missing, budget": ("split_forward_token_budget: 8", "sm_group_num is missing"),
    "sm_group_num 2": (
        "sm_group_num: 2",
        "sm_group_num is 2 but must be an integer, at least 3, at most 256: change it",
    ),
    "sm_group_num negative": ("sm_group_num: -1", "sm_group_num is -1 but must be an integer, at least 3, at most 256"),
    "sm_group_num string": (
        'sm_group_num: "8"',
        "sm_group_num is '8' (a string) but must be an integer, at least 3, at most 256: write the number without",
    ),
    "sm_group_num true": ("sm_group_num: true", "sm_group_num is true (a boolean) but must be an integer"),
    "sm_group_num float": ("sm_group_num: 8.0", "sm_group_num is 8.0 (a float) but must be an integer"),
    "sm_group_num null": ("sm_group_num:", "sm_group_num is null but must be an integer"),
    "sm_group_num list": ("sm_group_num: [8]", "sm_group_num is [8] but must be an integer"),
    "empty": ("", "is empty: write at least one setting"),
    "comments only": ("# nothing\n", "is empty"),
    "empty mapping": ("{}", "is empty"),
    "5 rows for 8 groups": (
        "sm_group_num: 8\nmanual_divisions: [[9,9,1],[9,9,2],[9,9,3],[9,9,4],[9,9,5]]",
        "manual_divisions has 5 rows but sm_group_num 8 needs 6, one for each group but the first and the last: "
        "set sm_group_num to 7 or give 6 rows",
    ),
    "row of two": (
        "sm_group_num: 3\nmanual_divisions: [[112, 20]]",
        "manual_divisions row 1 is [112, 20] but",
    ),
    "row of four": ("sm_group_num: 3\nmanual_divisions: [[112, 20, 1, 1]]", "manual_divisions row 1 is"),
    "row is a number": ("sm_group_num: 3\nmanual_divisions: [112]", "manual_divisions row 1 is 112 but"),
    "rows are a number": (
        "sm_group_num: 3\nmanual_divisions: 112",
        "manual_divisions is 112 but must be a list of rows",
    ),
    "rows are a mapping": ("sm_group_num: 3\nmanual_divisions: {a: 1}", "manual_divisions is {'a': 1} but"),
    "row with a string": ('sm_group_num: 3\nmanual_divisions: [[112, "20", 1]]', "row 1 is [112, '20', 1]"),
    "row with a float": ("sm_group_num: 3\nmanual_divisions: [[112, 20.0, 1]]", "row 1 is [112, 20.0, 1]"),
    "row with true": ("sm_group_num: 3\nmanual_divisions: [[112, 20, true]]", "row 1 is [112, 20, True]"),
    "zero SMs": ("sm_group_num: 3\nmanual_divisions: [[132, 0, 1]]", "[prefill_sms >= 1, decode_sms >= 1, "),
    "negative SMs": ("sm_group_num: 4\nmanual_divisions: [[99, 33, 1], [140, -8, 1]]", "row 2 is [140, -8, 1]"),
    "negative threshold": ("sm_group_num: 3\nmanual_divisions: [[112, 20, -1]]", "min_decode_batch >= 0]"),
    "divisor 0": (
        "sm_group_num: 8\ndecode_bs_divisor: 0",
        "decode_bs_divisor is 0 but must be an integer, at least 1: change it (the default is 36)",
    ),
    "budget 0": (
        "sm_group_num: 8\nsplit_forward_token_budget: 0",
        "split_forward_token_budget is 0 but must be an integer, at least 1: change or remove it",
    ),
    "budget negative": ("sm_group_num: 8\nsplit_forward_token_budget: -5", "split_forward_token_budget is -5"),
    "unknown key": (
        "sm_group_num: 8\nmanual_division: []",
        "'manual_division' is not a setting: did you mean manual_divisions?",
    ),
    "key of a branch": (
        "sm_group_num: 8\ntotal_cubes: 20",
        "'total_cubes' is not a setting: remove it, or use one of enabled, sm_group_num",
    ),
    "key not a string": ("sm_group_num: 8\n7: 1", "7 is not a setting"),
    "file in a file": ("layers_per_group: 2\nconfig: other.yml", "config is not allowed in a file"),
    "not YAML": ("sm_group_num: [8", "is not YAML or JSON (while parsing a flow sequence, expected ',' or ']'"),
    "a key twice": (
        "sm_group_num: 8\nsm_group_num: 9",
        "pdmux.yml: 'sm_group_num' is given twice, the second time in line 2: remove one of them",
    ),
    "a key twice in JSON that is not YAML": (
        '{\n\t"sm_group_num": 8,\n\t"sm_group_num": 9\n}',
        "pdmux.yml: 'sm_group_num' is given twice: remove one of them",
    ),
    "a key twice in what is merged": (
        "<<: {sm_group_num: 8, sm_group_num: 9}",
        "pdmux.yml: 'sm_group_num' is given twice, the second time in line 1: remove one of them",
    ),
    "a mapping that is none": (
        "sm_group_num: !!map foo",
        "is not YAML or JSON (expected a mapping node, but found scalar, line 1, column 15): correct it there",
    ),
    "not text": (b"\x00\xff\x01", "is not YAML or JSON ("),
    "bad date": ("sm_group_num: 2024-13-45", "is not YAML or JSON (month must be in 1..12)"),
    "two documents": ("sm_group_num: 8\n---\nsm_group_num: 8", "(expected a single document in the stream"),
    "list": ("- sm_group_num: 8", "holds [{'sm_group_num': 8}] but must be one mapping"),
    "text": ("sm_group_num 8", "holds 'sm_group_num 8' (a string) but must be one mapping"),
    "number": ("0", "holds 0 but must be one mapping"),
    "object": ("!!python/object/apply:os.getcwd []", "is not YAML or JSON ("),
    "policy": (
        "policy: slow",
        "policy is 'slow' (a string) but must be 'table' or 'fixed' or 'slo' or 'off': change it (the default is "
        "table)",
    ),
    "policy number": ('policy: "8"', "must be 'table' or 'fixed' or 'slo' or 'off': change it"),
    "lane": ("lane: 2", "lane is 2 but must be 'threaded' or 'serial'"),
    "enabled": ("enabled: 1", "enabled is 1 but must be true or false"),
    "layers 0": ("layers_per_group: 0", "layers_per_group is 0 but must be an integer, at least 1"),
    "trace": ("trace_steps: -1", "trace_steps is -1 but must be an integer, at least 0"),
    "sharing": (
        "sharing: both",
        "sharing is 'both' (a string) but must be 'capped' or 'disjoint', or a list of them with one for each "
        "division: change it",
    ),
    "sharing true": ("sharing: true", "sharing is true (a boolean) but must be 'capped' or 'disjoint', or a list"),
    "sharing null": ("sharing:", "sharing is null but must be 'capped' or 'disjoint', or a list"),
    "sharing of nothing": ("sharing: []", "sharing is [] but must be 'capped' or 'disjoint', or a list"),
    "sharing list": (
        "sm_group_num: 4\nsharing: [capped, both]",
        "sharing is ['capped', 'both'] but must be 'capped' or 'disjoint', or a list of them with one for each",
    ),
    "sharing mapping": ("sharing: {capped: 1}", "sharing is {'capped': 1} but must be 'capped' or 'disjoint'"),
    "sharing list too short": (
        "sm_group_num: 5\nsharing: [capped, disjoint]",
        "sharing lists 2 but sm_group_num 5 needs 3, one for each division: give 3, or one word for all",
    ),
    "sharing list too long": (
        "sm_group_num: 3\nsharing: [capped, disjoint]",
        "sharing lists 2 but sm_group_num 3 needs 1, one for each division: give 1, or one word for all",
    ),
    "backend": (
        "backend: gpu",
        "backend is 'gpu' (a string) but must be 'auto' or 'cuda' or 'sgl_kernel' or 'streams' or 'serial': change it "
        "(the default is auto)",
    ),
    "prefill tokens 0": (
        "max_prefill_tokens: 0",
        "max_prefill_tokens is 0 but must be an integer, at least 1: change or remove it",
    ),
    "prefill tokens float": ("max_prefill_tokens: 8.0", "max_prefill_tokens is 8.0 (a float) but must be an integer"),
    "prefill tokens string": ('max_prefill_tokens: "8"', "at least 1: write the number without quotes"),
    "graph share above": (
        "graph_memory_share: 0.6",
        "graph_memory_share is 0.6 (a float) but must be a number, at least 0, at most 0.5: change it (the default is "
        "0.03)",
    ),
    "graph share below": ("graph_memory_share: -1", "graph_memory_share is -1 but must be a number, at least 0, at"),
    "graph share string": ('graph_memory_share: "0.1"', "graph_memory_share is '0.1' (a string) but must be a number"),
    "graph share true": ("graph_memory_share: true", "graph_memory_share is true (a boolean) but must be a number"),
    "graph share nan": ("graph_memory_share: .nan", "graph_memory_share is nan (a float) but must be a number"),
    "graph seconds": (
        "graph_capture_s: -0.5",
        "graph_capture_s is -0.5 (a float) but must be a number, at least 0: change it (the default is 30.0)",
    ),
    "long value": (f"policy: {'x' * 5000}", "policy is 'xxx"),
    "line break in a value": ('policy: "a\\nb"', "policy is 'a\\nb'"),
}


@pytest.mark.parametrize("text, problem", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_one_line_that_names_file_field_value_and_limit(write, text, problem):
    path = write(text)
    message = error_of({"config": path})
    assert message.startswith(f"file {path}: ")
    assert problem in message
    assert len(message) < len(path) + 450
    assert error_of(None, {"PDMUX_CONFIG": path}) == message.replace(path, f"{path} (PDMUX_CONFIG)", 1)


def test_more_groups_than_the_default_need_no_second_setting(write):
    """SGLang fails when the file's number of groups is not that of its command line; here there is one number."""
    assert resolve({"config": write("sm_group_num: 10")}, {}).config.sm_group_num == 10


@pytest.mark.parametrize(
    "text, expected",
    [
        ("sharing: disjoint", {"sharing": "disjoint"}),
        ("sm_group_num: 4\nsharing: [capped, disjoint]", {"sharing": ("capped", "disjoint")}),
        ("sm_group_num: 3\nsharing: [disjoint]", {"sharing": ("disjoint",)}),
        *((f"backend: {name}", {"backend": name}) for name in ("auto", "cuda", "sgl_kernel", "streams", "serial")),
        ("max_prefill_tokens: 1", {"max_prefill_tokens": 1}),
        ("lane: serial\nmax_prefill_tokens:", {"max_prefill_tokens": None}),
        ("graph_memory_share: 0", {"graph_memory_share": 0}),
        ("graph_memory_share: 0.5", {"graph_memory_share": 0.5}),
        ("graph_capture_s: 0", {"graph_capture_s": 0}),
        ("graph_capture_s: 2.5", {"graph_capture_s": 2.5}),
    ],
)
def test_the_settings_of_partitions_have_these_values(write, text, expected):
    config = resolve({"config": write(text)}, {}).config
    assert {name: getattr(config, name) for name in expected} == expected
    assert hash(config) == hash(resolve({"config": write(text)}, {}).config)


@pytest.mark.parametrize("text", ["layers_per_group: 4", "split_forward_token_budget: 9\ntrace_steps: 1"])
def test_a_file_with_settings_of_ours_needs_no_sm_group_num(write, text):
    config = resolve({"config": write(text)}, {}).config
    assert config.sm_group_num == 8
    assert config.split_forward_token_budget != 65536


def test_all_problems_of_a_source_are_in_one_message(write):
    message = error_of({"config": write("decode_bs_divisor: 0\nsm_groups: 8\npolicy: x\nlane: y")})
    problems = message.split("; ")
    assert len(problems) == 5
    assert all(any(name in problem for problem in problems) for name in ["'sm_groups'", "policy", "lane"])
    assert any("sm_group_num is missing" in problem for problem in problems)


class TestUnreadableFiles:
    def test_missing(self, tmp_path):
        path = tmp_path / "none.yml"
        assert error_of({"config": str(path)}).startswith(f"file {path}: cannot be read as {path} (No such file")
        assert error_of({"config": path}).startswith(f"file {path}: ")
        message = error_of(None, {"PDMUX_CONFIG": str(path)})
        assert message.startswith(f"file {path} (PDMUX_CONFIG): cannot be read")

    def test_a_relative_path_is_reported_with_the_place_that_was_looked_in(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert f"file none.yml: cannot be read as {tmp_path / 'none.yml'} (" in error_of({"config": "none.yml"})

    def test_a_folder(self, tmp_path):
        assert "(Is a directory)" in error_of({"config": str(tmp_path)})

    def test_without_the_right_to_read(self, write):
        path = write("sm_group_num: 8")
        os.chmod(path, 0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read every file")
        assert "(Permission denied)" in error_of({"config": path})

    @pytest.mark.parametrize("path", ["a\nb.yml", "a\0b.yml", "~nobody-of-that-name/x.yml"])
    def test_strange_paths_are_one_line_too(self, path):
        assert "cannot be read" in error_of({"config": path})


class TestInline:
    @pytest.mark.parametrize("inline", [True, "pdmux.yml", ["config"], 8])
    def test_it_is_a_mapping(self, inline):
        assert error_of(inline).startswith("additional_config['pdmux'] is ")

    @pytest.mark.parametrize(
        "inline, problem",
        [
            ({"sm_group_num": "8"}, "sm_group_num is '8' (a string)"),
            ({"layer_per_group": 8}, "'layer_per_group' is not a setting: did you mean layers_per_group?"),
            ({"confg": "x.yml"}, "'confg' is not a setting: did you mean config?"),
            ({"config": 8}, "config is 8 but must be the path of a file"),
            ({"config": ""}, "config is '' (a string) but must be the path of a file"),
            ({"sm_group_num": 4, "manual_divisions": [[66, 66, 1]]}, "set sm_group_num to 3 or give 2 rows"),
            ({"policy": "fixed"}, "fixed_group is not set but policy fixed needs it"),
            ({"policy": "fixed", "fixed_group": 7}, "fixed_group is 7 but must be 1 to 6, as sm_group_num is 8"),
            ({"policy": "fixed", "fixed_group": 0}, "fixed_group is 0 but must be an integer, at least 1"),
            ({"fixed_group": 2}, "fixed_group is 2 but policy table does not use it"),
            ({"watchdog_s": -1}, "watchdog_s is -1 but must be a number, at least 0"),
            ({"watchdog_s": 0, "watchdog_action": "exit"}, "watchdog_action is exit but watchdog_s 0 turns it off"),
            ({"watchdog_s": 0, "watchdog_action": "fail"}, "watchdog_action is fail but watchdog_s 0 turns it off"),
            ({"lane": "serial", "watchdog_action": "fail"}, "with lane serial the engine itself hangs where the lane"),
            ({"itl_slo_ms": 9, "layers_per_group": 2}, "layers_per_group is 2 but policy slo, which chooses layers"),
            ({"sharing": ["capped"]}, "sharing lists 1 but sm_group_num 8 needs 6, one for each division"),
            ({"sharing": ("capped", "x")}, "sharing is ('capped', 'x') but must be 'capped' or 'disjoint', or a list"),
        ],
    )
    def test_a_wrong_key_or_value_is_named_with_its_source(self, inline, problem):
        message = error_of(inline)
        assert message.startswith("additional_config['pdmux']: ")
        assert problem in message

    def test_it_needs_no_sm_group_num(self):
        assert resolve({"decode_bs_divisor": 8}, {}).config == PDMuxConfig(decode_bs_divisor=8)

    def test_direct_construction_checks_the_same(self):
        with pytest.raises(ValidationError, match="set sm_group_num to 3 or give 6 rows"):
            PDMuxConfig(manual_divisions=[[66, 66, 1]])
        with pytest.raises(ValidationError, match="sharing lists 2 but sm_group_num 8 needs 6"):
            PDMuxConfig(sharing=["capped", "disjoint"])


class TestPrecedence:
    def test_later_sources_win_field_by_field_and_each_value_has_its_origin(self, write):
        environment = write("trace_steps: 1\nlayers_per_group: 1\nlane: serial", "environment.yml")
        file = write("trace_steps: 2\nlayers_per_group: 2", "file.yml")
        resolved = resolve({"config": file, "trace_steps": 3}, {"PDMUX_CONFIG": environment})
        assert resolved.config == PDMuxConfig(trace_steps=3, layers_per_group=2, lane="serial")
        assert resolved.origins["trace_steps"] == "additional_config"
        assert resolved.origins["layers_per_group"] == f"file {file}"
        assert resolved.origins["lane"] == f"file {environment} (PDMUX_CONFIG)"
        assert resolved.origins["policy"] == "default"

    def test_a_later_source_can_take_a_setting_back(self, write):
        path = write(SGLANG_DOCUMENTED)
        inline = {"config": path, "manual_divisions": None, "split_forward_token_budget": None}
        assert resolve(inline, {}).config == PDMuxConfig()

    def test_sources_that_do_not_go_together_are_both_named(self, write):
        path = write(SGLANG_DOCUMENTED)
        message = error_of({"config": path, "sm_group_num": 5})
        assert "additional_config['pdmux']" in message
        assert f"file {path}" in message
        assert "manual_divisions has 6 rows but sm_group_num 5 needs 3" in message

    def test_a_list_of_sharings_and_a_number_of_groups_from_elsewhere_are_both_named(self, write):
        path = write("sm_group_num: 4\nsharing: [capped, disjoint]")
        message = error_of({"config": path, "sm_group_num": 5})
        assert message.startswith(f"additional_config['pdmux'] with file {path}: sharing lists 2 but sm_group_num 5 ")

    @pytest.mark.parametrize(
        "sharing, shown", [("[capped, disjoint]", "['capped', 'disjoint']"), ("disjoint", "disjoint")]
    )
    def test_the_log_line_shows_sharings_as_they_are_written(self, write, sharing, shown):
        path = write(f"sm_group_num: 4\nsplit_forward_token_budget:\nsharing: {sharing}")
        line = resolve({"config": path}, {}).describe()
        assert line == f"sm_group_num=4 (file {path}), sharing={shown} (file {path})"

    def test_the_log_line_has_only_what_was_changed(self, write):
        path = write("sm_group_num: 3\nmanual_divisions: [[66, 66, 1]]\ndecode_bs_divisor: 36")
        line = resolve({"config": path, "lane": "serial"}, {}).describe()
        assert line == (
            f"sm_group_num=3 (file {path}), manual_divisions=[[66, 66, 1]] (file {path}), "
            f"split_forward_token_budget=65536 (implied by sm_group_num in file {path}), "
            "lane=serial (additional_config)"
        )


class TestTarget:
    def test_a_target_asks_for_its_policy(self, write):
        resolved = resolve({"itl_slo_ms": 25}, {})
        assert (resolved.config.policy, resolved.config.itl_slo_ms) == ("slo", 25)
        assert resolved.origins["itl_slo_ms"] == "additional_config"
        assert resolved.origins["policy"] == "implied by itl_slo_ms"
        path = write("itl_slo_ms: 12.5")
        assert resolve({"config": path}, {}).config.policy == "slo"

    def test_a_conflict_with_a_policy_that_is_implied_names_where_the_target_is(self):
        with pytest.raises(ConfigError, match=r"^additional_config\['pdmux'\]: fixed_group is 2"):
            resolve({"itl_slo_ms": 25, "fixed_group": 2}, {})

    def test_a_target_for_the_first_token_does_too(self):
        config = resolve({"ttft_slo_ms": 800}, {}).config
        assert (config.policy, config.itl_slo_ms, config.ttft_slo_ms) == ("slo", None, 800)
        with pytest.raises(ConfigError, match="ttft_slo_ms is 800 but policy table does not use it"):
            resolve({"ttft_slo_ms": 800, "policy": "table"}, {})

    def test_the_policy_needs_no_target(self):
        assert resolve({"policy": "slo"}, {}).config.itl_slo_ms is None

    def test_off_may_be_written_as_yaml_reads_it(self, write):
        assert resolve({"config": write("policy: off")}, {}).config.policy == "off"
        assert resolve({"policy": "off"}, {}).config.policy == "off"

    @pytest.mark.parametrize("policy", [{"policy": "table"}, {"policy": "fixed", "fixed_group": 1}])
    def test_another_policy_that_is_named_beside_it_is_an_error(self, policy):
        with pytest.raises(ConfigError, match=f"itl_slo_ms is 25 but policy {policy['policy']} does not use it: set "):
            resolve({"itl_slo_ms": 25, **policy}, {})

    def test_a_target_of_one_source_and_a_policy_of_another_are_both_named(self, write):
        with pytest.raises(ConfigError, match=r"file .* with additional_config\['pdmux'\]: itl_slo_ms is 25 but"):
            resolve({"itl_slo_ms": 25, "config": write("policy: table")}, {})

    @pytest.mark.parametrize("value", [0, -1, "25", True, float("inf")])
    def test_a_target_is_a_number_above_0(self, value):
        with pytest.raises(ConfigError, match=r"itl_slo_ms is .* but must be a number above 0"):
            resolve({"itl_slo_ms": value}, {})

    def test_its_limits_belong_to_it_alone(self):
        for name in ("prefill_wait_limit_ms", "itl_limit_ms"):
            with pytest.raises(ConfigError, match=f"{name} is 900 but policy table does not use it: set policy slo"):
                resolve({name: 900}, {})

    def test_the_limit_of_itl_is_not_below_its_target(self):
        assert resolve({"itl_slo_ms": 25, "itl_limit_ms": 25}, {}).config.itl_limit_ms == 25
        with pytest.raises(ConfigError, match="itl_limit_ms is 20 but must be at least itl_slo_ms, 25: raise it"):
            resolve({"itl_slo_ms": 25, "itl_limit_ms": 20}, {})
