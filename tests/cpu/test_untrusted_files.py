# SPDX-License-Identifier: Apache-2.0
"""Files that a user names are data: whatever is in them is a valid result or one line that says what is wrong, soon."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import stat
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vllm_pdmux
from vllm_pdmux import config_sources
from vllm_pdmux.cache_folder import make_private
from vllm_pdmux.calibration import CalibrationError, cache
from vllm_pdmux.calibration.chosen import named_profile, prior_of
from vllm_pdmux.config import ConfigError, Resolved, resolve
from vllm_pdmux.config_model import FIELDS
from vllm_pdmux.simulator import DeviceProfile, profile

SOURCES = sorted(Path(vllm_pdmux.__file__).parent.rglob("*.py"))
KEY = {"device": "a GPU", "units": 132}
PROFILE = {
    "name": "made up",
    "decode_fixed_ms": 5.0,
    "decode_ms_per_request": 0.02,
    "decode_ms_per_context_token": 1e-5,
    "prefill_fixed_ms": 1.0,
    "prefill_ms_per_token": 0.02,
    "prefill_ms_per_token_pair": 1e-6,
    "fused_parts": [0.5, 1.2, 1.1],
    "fused_prompt": 1.0,
    "kv_tokens": 400_000,
    "groups": [
        {"sharing": "capped", "prefill_sms": 84, "decode_sms": 48, "slowdown": 1.5, "pace": 0.5},
        {
            "sharing": "disjoint",
            "prefill_sms": 84,
            "decode_sms": 48,
            "slowdown": 1.2,
            "pace": 0.4,
            "pace_line": [0.4, 0.1],
        },
    ],
    "key": KEY,
}
SOON_S = 30  # many times what the slowest of these takes on a busy machine
LONGEST_LINE = 10_000
EXAMPLES = settings(
    max_examples=150,
    deadline=timedelta(seconds=SOON_S),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1 << 64, 1e308, 5e-324, 0, -0.0])
scalars = st.none() | st.booleans() | numbers | st.text(st.characters(), max_size=20) | st.just("\ud800")
keys = st.sampled_from([*FIELDS, "config", *PROFILE]) | st.text(max_size=10)
plain = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))
mappings = st.dictionaries(keys, plain, max_size=6)
# Of YAML what is more than JSON, and what it is easy to go wrong with.
WORDS = [
    *(": ", "- ", "? ", "\n", "\n  ", "[", "]", "{", "}", ", ", "<<: ", "&a ", "*a", "|", ">", "---\n", "...\n", "\t"),
    *(
        "!!int ",
        "!!bool ",
        "!!float ",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!null ",
        "!x ",
        "%YAML 1.1\n",
    ),
    *(
        "2001-99-99",
        "0x" + "f" * 5000,
        "1:59:59",
        ".nan",
        "-.inf",
        "1_0",
        "0b",
        "'",
        '"',
        "#",
        "~",
        "=",
        "\x85",
        "\ufeff",
    ),
    *(f"\n{name}: " for name in FIELDS),
    *("8", "1", "capped", "slo", "[84, 48, 1]"),
]
TAGS = [word for word in WORDS if word.startswith("!")]
lines = st.tuples(
    st.sampled_from(FIELDS), st.sampled_from(["", *TAGS]), st.sampled_from([*WORDS, ""]) | st.text(max_size=8)
)
yaml_lines = st.lists(lines.map(lambda parts: "{}: {}{}".format(*parts)), min_size=1, max_size=4).map("\n".join)
yaml_texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=30).map("".join)
contents = st.one_of(
    st.binary(max_size=500),
    st.text(max_size=300).map(lambda text: text.encode(errors="replace")),
    mappings.map(lambda value: json.dumps(value).encode()),
    plain.map(lambda value: json.dumps(value).encode()),
    (yaml_lines | yaml_texts).map(lambda text: text.encode(errors="replace")),
)


@st.composite
def profiles(draw):
    """A profile in which some values are others."""
    value = json.loads(json.dumps(PROFILE))
    for name in draw(st.lists(st.sampled_from([*PROFILE, "stray"]), max_size=3)):
        value[name] = draw(plain)
    if isinstance(value["groups"], list) and draw(st.booleans()):
        value["groups"][:1] = [draw(mappings | st.just(PROFILE["groups"][0] | draw(mappings)))]
    return json.dumps(value).encode()


def assert_is_one_line(text):
    assert text.isprintable() and len(text) < LONGEST_LINE


def settings_in(path, content):
    """The settings, or None: refused as promised."""
    path.write_bytes(content)
    try:
        return resolve(None, {"PDMUX_CONFIG": str(path)})
    except ConfigError as error:
        assert_is_one_line(str(error))
        assert str(path) in str(error)
        return None


def calibration_in(content):
    """What an engine gets of the cache, or None: refused as promised, as file of the cache and as one that is named."""
    path = cache.path_of(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    said = []
    found = cache.load(KEY, said.append)
    assert len(said) == (found is None)
    for line in said:
        assert_is_one_line(line)
    try:
        named_profile(resolve({"calibration": str(path), "policy": "slo"}, {}).config)
    except ConfigError as error:
        assert found is None
        assert_is_one_line(str(error))
    return found


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestAnything:
    @given(content=contents)
    @EXAMPLES
    def test_as_settings(self, tmp_path, content):
        found = settings_in(tmp_path / "pdmux.yml", content)
        assert found is None or isinstance(found, Resolved)

    @given(content=contents | profiles())
    @EXAMPLES
    def test_as_a_calibration(self, own_cache, content):
        found = calibration_in(content)
        if found is not None:
            assert isinstance(found, DeviceProfile)
            prior_of(found, len(found.groups))

    def test_what_is_right_is_taken(self, tmp_path, own_cache):
        found = settings_in(tmp_path / "pdmux.yml", b"policy: slo\nitl_slo_ms: 25\nmax_prefill_tokens: 0x1000")
        assert found is not None and found.config.max_prefill_tokens == 4096
        assert calibration_in(json.dumps(PROFILE).encode()) == DeviceProfile.model_validate(PROFILE)


FULL = config_sources.MOST_BYTES
HUGE = b"0x" + b"f" * (FULL - 100)
SETTINGS = {
    "nested lists": b"[" * FULL,
    "nested mappings": b"{a: " * (FULL // 4),
    "nested blocks": b"- " * (FULL // 2),
    "thousands of unknown keys": b"".join(b"%x:\n" % i for i in range(FULL // 6)),
    "thousands of wrong rows": b"sm_group_num: 3\nmanual_divisions: [" + b"[1]," * (FULL // 5) + b"]",
    "many merged mappings": b"<<: [" + b"{a: 1}," * (FULL // 8) + b"]",
    "a count that cannot be written in decimal": b"layers_per_group: " + HUGE,
    "a threshold that cannot be written in decimal": b"sm_group_num: 3\nmanual_divisions: [[8, 8, " + HUGE + b"]]",
    "a target that cannot be written in decimal": b"itl_slo_ms: " + HUGE,
    "a number with sexagesimal digits": b"itl_slo_ms: 1" + b":59" * (FULL // 4) + b".5",
    "a tag with another value": b"enabled: !!bool x",
    "a tag of Python": b"policy: !!python/object/apply:os.abort []",
    "unprintable characters": b"\0" * 100,
}


class TestSettings:
    @pytest.mark.parametrize("content", SETTINGS.values(), ids=SETTINGS)
    def test_a_file_of_the_largest_size_is_refused_soon(self, tmp_path, content):
        assert len(content) <= FULL
        start_s = time.monotonic()
        assert settings_in(tmp_path / "pdmux.yml", content) is None
        assert time.monotonic() - start_s < SOON_S

    def test_aliases_are_refused_before_they_are_expanded(self, tmp_path):
        merges = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
        text = "\n".join(["a0: &a0 {b: 1}", *merges])
        (tmp_path / "pdmux.yml").write_text(text)
        with pytest.raises(ConfigError, match=r"aliases are not read: write the value out, line 2"):
            resolve(None, {"PDMUX_CONFIG": str(tmp_path / "pdmux.yml")})

    def test_a_file_that_is_larger_is_named_with_the_limit(self, tmp_path):
        path = tmp_path / "pdmux.yml"
        path.write_bytes(b"#" * (FULL + 1))
        with pytest.raises(ConfigError, match=f"pdmux.yml .*is larger than {FULL} bytes.*: name the file of the"):
            resolve(None, {"PDMUX_CONFIG": str(path)})

    def test_one_of_the_largest_size_is_read(self, tmp_path):
        content = b"policy: off\n"
        assert settings_in(tmp_path / "pdmux.yml", content + b"#" * (FULL - len(content))) is not None

    def test_of_one_that_is_far_larger_only_so_much_is_read(self, tmp_path):
        with (tmp_path / "pdmux.yml").open("wb") as file:
            file.truncate(1 << 28)
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match="is larger than"):
                resolve(None, {"PDMUX_CONFIG": str(tmp_path / "pdmux.yml")})
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


class TestCalibration:
    @pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b" " * (profile.MOST_BYTES + 1)])
    def test_a_file_of_a_large_size_is_refused_soon(self, own_cache, content):
        start_s = time.monotonic()
        assert calibration_in(content) is None
        assert time.monotonic() - start_s < SOON_S

    def test_the_limit_is_named(self, own_cache, tmp_path):
        path = tmp_path / "profile.json"
        path.write_bytes(json.dumps(PROFILE).encode().ljust(profile.MOST_BYTES + 1))
        with pytest.raises(profile.ProfileError, match=f"profile.json: is larger than {profile.MOST_BYTES} bytes"):
            profile.read_profile(str(path))
        path.write_bytes(json.dumps(PROFILE).encode().ljust(profile.MOST_BYTES))
        assert profile.read_profile(str(path)).name == "made up"


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
class TestWhatIsNoFile:
    """To read it may take for ever, or give something else each time."""

    @pytest.fixture
    def path(self, kind, tmp_path, monkeypatch):
        path = "/dev/zero" if kind == "device" else str(tmp_path / "it")
        with contextlib.ExitStack() as closing:
            if kind == "fifo":
                os.mkfifo(path)
                # Of one that is full and open a reader gets something: a test that fails ends.
                handle = os.open(path, os.O_RDWR)
                closing.callback(os.close, handle)
                os.write(handle, b"#" * 60_000)
                monkeypatch.setattr(config_sources, "MOST_BYTES", 1000)
                monkeypatch.setattr(profile, "MOST_BYTES", 1000)
            elif kind == "socket":
                monkeypatch.chdir(tmp_path)  # the path of a socket must be short
                closing.enter_context(socket.socket(socket.AF_UNIX)).bind("it")
            yield path

    def test_as_settings(self, path):
        with pytest.raises(ConfigError, match=f"cannot be read as {path} .not a regular file.: correct path") as caught:
            resolve(None, {"PDMUX_CONFIG": path})
        assert_is_one_line(str(caught.value))

    def test_as_a_profile(self, path):
        with pytest.raises(profile.ProfileError, match=f"profile {path}: cannot be read .not a regular file.: correct"):
            profile.read_profile(path)


def rights(path):
    return stat.S_IMODE(os.stat(path).st_mode)


class TestTheCacheIsOfOneUser:
    STORED = DeviceProfile.model_validate(PROFILE)

    @pytest.fixture(autouse=True)
    def usual_umask(self):
        before = os.umask(0o022)
        yield
        os.umask(before)

    def test_what_is_made_is_for_this_user_alone(self, own_cache):
        path = cache.store(KEY, self.STORED, {})
        assert rights(path) == 0o600
        assert rights(path.parent) == rights(own_cache) == 0o700

    def test_a_folder_that_is_there_keeps_its_rights(self, tmp_path):
        (tmp_path / "mine").mkdir(mode=0o750)
        make_private(tmp_path / "mine" / "a" / "b")
        make_private(tmp_path / "mine" / "a" / "b")
        found = [rights(tmp_path / name) for name in ("mine", "mine/a", "mine/a/b")]
        assert found == [0o750, 0o700, 0o700]

    def test_a_file_that_the_user_names_is_one_that_others_may_read(self, tmp_path):
        cache.write(tmp_path / "profiles" / "mine.json", KEY, self.STORED, {})
        assert rights(tmp_path / "profiles" / "mine.json") == 0o644
        assert rights(tmp_path / "profiles") == 0o755

    @pytest.mark.parametrize("failing", ["replace", "fdopen"])
    def test_a_file_is_there_whole_or_not_at_all(self, own_cache, monkeypatch, failing):
        path = cache.store(KEY, self.STORED, {})
        before = path.read_bytes()

        def fail(handle, *args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, failing, fail)
        with pytest.raises(CalibrationError, match=r"cannot be written .No space left on device"):
            cache.store(KEY, self.STORED, {"more": 1})
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


# --- nothing that is read is run --------------------------------------------------------------------------------------

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
LOADERS = {"torch.load", "yaml.full_load", "yaml.unsafe_load"}


def dangers(source):
    """Of a module: "line: what" of each way in which data could become code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found = [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found = [name] if name in FORBIDDEN_CALLS | SHELLS | LOADERS else []
            found += [
                f"{word.arg}={ast.unparse(word.value)}"
                for word in node.keywords
                if (word.arg in ("shell", "allow_pickle") and ast.unparse(word.value) != "False")
                or (word.arg == "Loader" and ast.unparse(word.value) != "_Loader")
            ]
            if name == "yaml.load" and not any(word.arg == "Loader" for word in node.keywords):
                found.append(name)
        else:
            continue
        yield from (f"{node.lineno}: {what}" for what in found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(SOURCES[0].parent).as_posix())
def test_nothing_that_is_read_is_run(path):
    assert list(dangers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=is_shell)",
        "os.system(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(path)",
    ],
)
def test_what_would_be_run_is_found(source):
    assert len(list(dangers(source))) == 1


def test_the_loader_of_settings_is_a_safe_one():
    import yaml

    assert issubclass(config_sources._Loader, yaml.SafeLoader)
