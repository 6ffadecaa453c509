# SPDX-License-Identifier: Apache-2.0
"""Calibration: what is fitted, kept, refused, and what policy slo makes of it; and all of it on a real engine."""

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import async_engine
import pytest
from driver import Arrival, prompt
from tokens import assert_same
from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_pdmux.calibration import CalibrationError, cache, fit, measure, plan
from vllm_pdmux.calibration.chosen import chosen_profile, prior_of, with_groups
from vllm_pdmux.calibration.fit import Errors, errors, held_out_errors, nonnegative, split, too_large, usable
from vllm_pdmux.calibration.run import Calibration, calibrate
from vllm_pdmux.calibration.samples import (
    BesideSample,
    DecodeSample,
    Division,
    FusedSample,
    PrefillSample,
    Samples,
)
from vllm_pdmux.cli import main
from vllm_pdmux.config import ConfigError, PDMuxConfig, resolve
from vllm_pdmux.policy import DecodeAlone, Kind, Load, Observation, Share, SloPolicy, Target
from vllm_pdmux.policy.tail import FIRST_TAIL
from vllm_pdmux.simulator.profile import read_profile
from vllm_pdmux.support import settings_problems

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-h200-llama-8b.json"
DIVISIONS = (Division("capped", 84, 48), Division("disjoint", 84, 48))
# Of each division: by what the parts of a decode step are multiplied, and prefill's pace beside steps that are all
# fixed part, and what it loses for each time the fixed part takes more.
SLOWDOWNS = ((1.6, 2.0, 1.4), (1.5, 3.0, 2.4))
PACES = ((0.53, 0.04), (0.65, 0.01))
FUSED_PARTS, FUSED_PROMPT = (0.6, 1.3, 1.1), 1.05
H200 = plan.Limits(40960, 256, 8192, 2048, 800_000, 16)


class Device:
    """A device that behaves as the forms say, with noise."""

    fixed, per_request, per_token = 4.6, 0.014, 2.9e-5
    prefill_fixed, per_new, per_pair = 1.5, 0.0225, 8.7e-7

    def __init__(self, noise=0.0, seed=0):
        self._random, self._noise = random.Random(seed), noise

    def seen(self, value):
        return value * (1 + self._random.uniform(-self._noise, self._noise))

    def parts(self, batch, context):
        return self.fixed, self.per_request * batch, self.per_token * context

    def prompt_ms(self, new, reused):
        return self.per_new * new + self.per_pair * new * (reused + new / 2)

    def beside(self, load, number, group):
        batch, context = load.batch, load.batch * load.context_tokens
        parts = self.parts(batch, context)
        itl_ms = sum(part * times for part, times in zip(parts, SLOWDOWNS[group - 1], strict=True))
        pace = PACES[group - 1][0] - PACES[group - 1][1] * (sum(parts) / self.fixed - 1)
        rate = 2048 / self.prompt_ms(2048, 0) * 1e3 * pace
        return BesideSample(group, number, batch, context, 2048, self.seen(itl_ms), self.seen(rate), sum(parts))

    def fused(self, load, chunk):
        parts = self.parts(load.batch, load.batch * load.context_tokens)
        ms = sum(part * times for part, times in zip(parts, FUSED_PARTS, strict=True))
        ms = max(sum(parts), ms + FUSED_PROMPT * self.prompt_ms(chunk, 2048))
        return FusedSample(load.batch, load.batch * load.context_tokens, chunk, 2048, self.seen(ms), sum(parts))

    def samples(self):
        loads = plan.decode_loads(H200)
        beside = list(enumerate(plan.beside_loads(H200)))
        return Samples(
            decode=tuple(
                DecodeSample(
                    one.batch,
                    one.batch * one.context_tokens,
                    self.seen(sum(self.parts(one.batch, one.batch * one.context_tokens))),
                )
                for one in loads
            ),
            prefill=tuple(
                PrefillSample(n, r, self.seen(self.prefill_fixed + self.prompt_ms(n, r))) for n, r in plan.prompts(H200)
            ),
            beside=tuple(self.beside(load, number, group) for number, load in beside for group in (1, 2)),
            fused=tuple(self.fused(load, chunk) for _, load in beside for chunk in plan.fused_chunks(H200)),
            divisions=DIVISIONS,
            kv_tokens=800_000,
        )


class TestFit:
    def test_what_was_put_in_comes_out(self):
        profile = fit.fit(Device().samples(), "made up")
        assert profile.decode_fixed_ms == pytest.approx(Device.fixed)
        assert profile.decode_ms_per_request == pytest.approx(Device.per_request)
        assert profile.decode_ms_per_context_token == pytest.approx(Device.per_token)
        assert profile.prefill_fixed_ms == pytest.approx(Device.prefill_fixed)
        assert profile.prefill_ms_per_token == pytest.approx(Device.per_new)
        assert profile.prefill_ms_per_token_pair == pytest.approx(Device.per_pair)
        assert (*profile.fused_parts, profile.fused_prompt) == pytest.approx((*FUSED_PARTS, FUSED_PROMPT), rel=0.2)
        for group, (first, less) in zip(profile.groups, PACES, strict=True):
            assert group.pace_line == pytest.approx((first, less), rel=0.1, abs=0.005)
        assert [group.label for group in profile.groups] == ["capped 84:48", "disjoint 84:48"]
        for error in errors(profile, Device().samples()).values():
            assert error.max < 0.05  # the parts of a division are kept near their mean

    @pytest.mark.parametrize("seed", range(5))
    def test_with_noise_it_predicts_loads_that_it_has_not_seen(self, seed):
        profile = fit.fit(Device(0.03, seed).samples(), "noisy")
        found = Samples(
            (),
            (),
            beside=tuple(
                Device().beside(plan.DecodeLoad(batch, context), 0, group)
                for batch, context in ((32, 2048), (16, 16384), (128, 2048), (64, 8192), (8, 512))
                for group in (1, 2)
            ),
        )
        for error in errors(profile, found).values():
            assert error.median < 0.05 and error.p95 < 0.12

    @pytest.mark.parametrize("seed", range(5))
    def test_the_error_that_is_reported_is_of_points_held_out(self, seed):
        samples = Device(0.03, seed).samples()
        seen, unseen = split(samples)
        assert not {*seen.decode} & {*unseen.decode} and len(seen.decode) + len(unseen.decode) == len(samples.decode)
        assert {one.load for one in unseen.beside} == {1} and 1 not in {one.load for one in seen.beside}
        found = held_out_errors(samples)
        assert set(found) == set(fit.KINDS)
        assert found["decode beside prefill"].points == 2
        assert too_large(found) == []

    def test_a_wrong_point_that_is_held_out_is_seen(self):
        samples = Device().samples()
        wrong = [replace(one, itl_p50_ms=2 * one.itl_p50_ms) if one.load == 1 else one for one in samples.beside]
        found = held_out_errors(replace(samples, beside=tuple(wrong)))
        assert found["decode beside prefill"].median == pytest.approx(0.5, abs=0.05)
        problem = too_large(found)[0]
        assert problem.startswith("the median error of decode beside prefill is ")
        assert "but must be at most 10%: calibrate again" in problem

    def test_fused_steps_that_are_predicted_badly_are_left_out_and_the_rest_is_used(self):
        samples = Device().samples()
        assert usable(samples) == (samples, held_out_errors(samples), [])
        drawn = random.Random(0)
        wrong = replace(samples, fused=tuple(replace(one, ms=drawn.uniform(1, 100)) for one in samples.fused))
        used, found, reasons = usable(wrong)
        assert used == replace(samples, fused=()) and set(found) == {*fit.KINDS} - {"fused step"}
        assert reasons and all("error of fused step is" in reason for reason in reasons)
        profile = fit.fit(used, "made up")
        assert (profile.fused_parts, profile.fused_prompt) == ((1.0, 1.0, 1.0), 1.0)  # the sum of both lanes

    def test_garbage_is_refused(self):
        drawn = random.Random(0)
        samples = Device().samples()
        garbage = replace(samples, decode=tuple(replace(o, ms=drawn.uniform(1, 100)) for o in samples.decode))
        assert any("decode alone" in problem for problem in too_large(held_out_errors(garbage)))

    @pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_clock_that_is_broken_is_named(self, ms):
        samples = Device().samples()
        with pytest.raises(CalibrationError, match="a measured time or rate is not above 0"):
            fit.fit(replace(samples, prefill=(PrefillSample(10, 0, ms),)), "broken")

    def test_what_is_missing_is_named(self):
        samples = Device().samples()
        with pytest.raises(CalibrationError, match="no point of decode alone was measured"):
            fit.fit(replace(samples, decode=()), "half")
        with pytest.raises(CalibrationError, match="no point was measured beside prefill in group 2"):
            fit.fit(replace(samples, beside=tuple(one for one in samples.beside if one.group == 1)), "half")

    def test_no_coefficient_is_below_0(self):
        assert nonnegative([(1, 1), (1, 2), (1, 3)], [3, 2, 1])[1] == 0
        assert nonnegative([(1, 0), (0, 1)], [2, 5]) == pytest.approx([2, 5])

    def test_one_load_alone_still_makes_a_profile(self):
        samples = Device().samples()
        one = replace(samples, decode=samples.decode[:1], prefill=samples.prefill[:1], beside=samples.beside[:2])
        profile = fit.fit(one, "small")
        assert errors(profile, one)["decode beside prefill"].max < 0.01


class TestPlan:
    @pytest.mark.parametrize("seats", [1, 2, 16, 256, 1024])
    @pytest.mark.parametrize("length", [128, 512, 8192, 131072])
    @pytest.mark.parametrize("kv_tokens", [8192, 800_000])
    def test_points_fit_the_engine(self, seats, length, kv_tokens):
        limits = plan.Limits(length, seats, 2048, 1024, kv_tokens, 16)
        for load in plan.decode_loads(limits):
            assert 1 <= load.batch <= max(1, seats - plan.FREE_SEATS)
            assert 16 <= load.context_tokens <= length / 2 and load.context_tokens % 16 == 0
            assert load.batch * load.context_tokens <= max(0.6 * kv_tokens, 16 * load.batch)
        for new, reused in plan.prompts(limits):
            assert 2 <= new <= 2048 and reused % 16 == 0 and new + reused < length
        assert plan.lane_prompt(limits) < length

    def test_the_loads_of_a_large_engine_are_far_apart(self):
        loads = plan.decode_loads(H200)
        assert loads[:4] == plan.beside_loads(H200)
        sizes = [(load.batch, load.batch * load.context_tokens) for load in loads]
        assert max(batch for batch, _ in sizes) == 250 and min(batch for batch, _ in sizes) == 1
        assert max(tokens for _, tokens in sizes) >= 0.45 * H200.kv_tokens


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / cache.FOLDER


class TestCache:
    KEY = {"device": "a GPU", "units": 132, "groups": [["capped", 84, 48]]}

    def stored(self):
        profile = fit.fit(Device().samples(), "made up")
        return profile, cache.store(self.KEY, profile, {"errors": {}})

    def test_what_is_stored_is_found(self, cache_folder):
        said = []
        assert cache.load(self.KEY, said.append) is None
        profile, path = self.stored()
        assert cache.load(self.KEY, said.append) == profile == read_profile(str(path))
        assert path.parent == cache_folder and said == []
        assert os.listdir(cache_folder) == [path.name]  # nothing of the writing is left

    def test_another_engine_has_another(self, cache_folder):
        self.stored()
        for change in ({"units": 114}, {"groups": [["capped", 68, 64]]}, {"dtype": "float16"}):
            assert cache.load(self.KEY | change, pytest.fail) is None

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "x"}', b"\xff\xfe\x00", '"text"', "null"])
    def test_a_damaged_file_is_said_and_counts_as_none(self, cache_folder, text):
        _, path = self.stored()
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        said = []
        assert cache.load(self.KEY, said.append) is None
        assert len(said) == 1 and str(path) in said[0] and "vllm-pdmux calibrate --model MODEL --force" in said[0]
        assert said[0].count("make it") == 1, "one way out"

    def test_a_file_that_cannot_be_read_is_said(self, cache_folder):
        _, path = self.stored()
        path.unlink()
        path.mkdir()
        said = []
        assert cache.load(self.KEY, said.append) is None
        assert str(path) in said[0]

    def test_a_file_of_another_engine_under_our_name_is_not_used(self, cache_folder):
        profile, path = self.stored()
        cache.write(path, {"device": "another"}, profile, {})
        said = []
        assert cache.load(self.KEY, said.append) is None
        assert "of another engine" in said[0]

    def test_a_write_that_fails_leaves_what_was_there(self, cache_folder, monkeypatch):
        profile, path = self.stored()

        def fail(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(CalibrationError, match=r"cannot be written .No space left on device.*PDMUX_CACHE=FOLDER"):
            self.stored()
        assert cache.load(self.KEY, pytest.fail) == profile
        assert os.listdir(cache_folder) == [path.name]


class TestSetting:
    @pytest.mark.parametrize("value", ["", " ", 5, None, ["auto"], True])
    def test_what_is_no_calibration_is_named(self, value):
        with pytest.raises(ConfigError, match=r"calibration is .* but must be 'auto', 'off' or the path of a profile"):
            resolve({"calibration": value, "policy": "slo"}, {})

    def test_yaml_reads_off_as_false(self):
        assert resolve({"calibration": False}, {}).config.calibration == "off"

    def test_another_policy_does_not_use_one(self):
        with pytest.raises(ConfigError, match="but policy table does not use it: set policy slo, or remove it"):
            resolve({"calibration": "profile.json"}, {})

    @pytest.mark.parametrize(("text", "problem"), [(None, "cannot be read"), ("{", "is not JSON"), ("{}", "name: ")])
    def test_a_file_that_cannot_be_used_is_an_error_at_start(self, tmp_path, text, problem):
        path = tmp_path / "profile.json"
        if text is not None:
            path.write_text(text)
        settings = SimpleNamespace(backend="auto", sharing="capped", calibration=str(path), watchdog_action="log")
        one_rank = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
        (found,) = settings_problems(one_rank, settings)
        assert found.startswith(f"calibration is '{path}' but cannot be used: profile {path}: {problem}")

    def test_divisions_that_it_does_not_have_are_an_error(self):
        profile = read_profile(str(MEASURED))
        wanted = [Division("capped", 84, 48), Division("capped", 112, 20)]
        with pytest.raises(ConfigError, match=r"has no division capped 112:20 \(it has capped 100:32, .*manual_div"):
            with_groups(profile, wanted, "profile.json")

    def test_divisions_come_in_the_order_of_the_engine(self):
        wanted = [Division("disjoint", 68, 64), Division("capped", 84, 48)]
        found = with_groups(read_profile(str(MEASURED)), wanted, "profile.json")
        assert [group.label for group in found.groups] == ["disjoint 68:64", "capped 84:48"]

    def test_off_uses_none_and_says_so(self):
        said = []
        assert chosen_profile(None, PDMuxConfig(policy="slo", calibration="off"), said.append, pytest.fail) is None
        assert said == ["calibration: off: learning from serving"]


class TestPolicy:
    """On a simulated device that is as the profile says, or is not."""

    def policy(self, profile, itl_ms=None):
        shares = [Share(group.sharing == "disjoint", group.prefill_sms / 132) for group in profile.groups]
        prior = prior_of(profile, len(shares))
        alone = DecodeAlone(16e9, 131072)
        return SloPolicy(shares, Target(itl_ms), alone, True, lambda text: None, profile.prompt_work, prior)

    @pytest.mark.parametrize("times_alone", [1.7, 1.9, 2.2, 2.6, 3.5])
    @pytest.mark.parametrize(("batch", "context"), [(32, 2048), (128, 2048), (64, 8192), (1, 512)])
    def test_the_first_decision_is_right(self, times_alone, batch, context):
        profile = fit.fit(Device().samples(), "made up")
        load = Load(batch, 2048, 32, batch * context, 2048.0)
        alone_ms = profile.decode_ms(batch, batch * context)
        group = self.policy(profile, times_alone * alone_ms).decide(load).group
        slowdowns = [profile.slowdown(one, batch, batch * context) for one in profile.groups]
        paces = [profile.pace(one, batch, batch * context) for one in profile.groups]
        allowed = [place for place, slowdown in enumerate(slowdowns) if slowdown * FIRST_TAIL <= times_alone]
        if allowed:
            assert group - 1 == max(allowed, key=paces.__getitem__)
        else:
            assert group - 1 == slowdowns.index(min(slowdowns))

    def test_a_division_may_be_right_for_one_load_and_wrong_for_another(self):
        profile = fit.fit(Device().samples(), "made up")
        short, long = Load(4, 2048, 32, 4 * 512, 2048.0), Load(64, 2048, 32, 64 * 8192, 2048.0)
        target = lambda load: 1.85 * profile.decode_ms(load.decode_batch, load.context_tokens)  # noqa: E731
        assert self.policy(profile, target(short)).decide(short).group == 2
        assert self.policy(profile, target(long)).decide(long).group == 1

    def test_all_rates_are_known_at_once(self):
        profile = fit.fit(Device().samples(), "made up")
        slo = self.policy(profile, 1000.0)
        load = Load(32, 2048, 32, 65536, 2048.0, waiting_work=1e6)
        assert slo._alone.is_known and slo._beside.knows_a_rate
        expected = slo._beside.beliefs(slo._alone.mix(32, 65536))
        for belief, group in zip(expected, profile.groups, strict=True):
            assert belief.rate == pytest.approx(profile.pace(group, 32, 65536) / profile.prefill_ms_per_token)
            assert belief.slowdown == pytest.approx(profile.slowdown(group, 32, 65536))
        assert slo.fused_tokens(load) > 4096  # the target is loose, and the prompt's own rate is known

    @pytest.mark.parametrize("off_by", [0.75, 1.3, 1.6])
    def test_what_is_wrong_in_it_is_corrected(self, off_by):
        """The device's decode steps take `off_by` times what was calibrated, alone and beside prefill."""
        profile = fit.fit(Device().samples(), "made up")
        batch, context = 32, 65536
        alone_ms = off_by * profile.decode_ms(batch, context)
        slo = self.policy(profile, 2.4 * alone_ms)
        for _ in range(60):
            slo.observe(Observation(Kind.DECODE, alone_ms, batch, context))
        assert slo._alone.ms(batch, context) == pytest.approx(alone_ms, rel=0.02)

    @pytest.mark.parametrize("off_by", [1.25, 1.5])
    def test_a_slowdown_that_is_wrong_is_corrected(self, off_by):
        profile = fit.fit(Device().samples(), "made up")
        batch, context = 32, 65536
        load = Load(batch, 2048, 32, context, 2048.0)
        alone_ms = profile.decode_ms(batch, context)
        slowdowns = [off_by * profile.slowdown(group, batch, context) for group in profile.groups]
        target_ms = 1.2 * min(slowdowns) * alone_ms
        slo = self.policy(profile, target_ms)
        late = []
        for _ in range(600):
            slo.observe(Observation(Kind.DECODE, alone_ms, batch, context))
            group = slo.decide(load).group
            ms = slowdowns[group - 1] * alone_ms
            slo.observe(Observation(Kind.BESIDE, ms, batch, context, 100.0, group))
            late.append(ms > target_ms)
        assert sum(late[300:]) <= 10

    def test_a_profile_without_groups_says_nothing_of_them(self):
        profile = read_profile(str(MEASURED)).model_copy(update={"groups": ()})
        assert prior_of(profile, 6).groups == ()

    def test_a_device_with_fewer_groups_runs_the_others_in_its_last(self):
        profile = fit.fit(Device().samples(), "made up")
        groups = prior_of(profile, 4).groups
        assert len(groups) == 4 and groups[1] == groups[2] == groups[3]


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ([], "the following arguments are required: --model"),
            (["--model", "m", "--config", "/no/such.yml"], "file /no/such.yml: cannot be read"),
            (["--model", "m", "--max-model-len", "0"], "--max-model-len: is '0' but must be a number above 0"),
            (["--model", "m", "--gpu-memory-utilization", "x"], "--gpu-memory-utilization: is 'x' but must be"),
            (["--model", "m", "--hf-overrides", "[1]"], "--hf-overrides: is '[1]' but must be a JSON object"),
            (["--model", "m", "--forse"], "unrecognized arguments: --forse"),
            (["--model", "/no/such/model"], "vLLM does not start with /no/such/model: "),
        ],
    )
    def test_what_is_wrong_is_one_line(self, capfd, cache_folder, arguments, problem):
        assert main(["calibrate", *arguments]) == 2
        said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("vllm-pdmux calibrate")]
        assert len(said) == 1 and problem in said[0]

    @pytest.mark.parametrize("is_good", [True, False])
    def test_errors_that_are_too_large_are_not_stored(self, capfd, cache_folder, tmp_path, monkeypatch, is_good):
        samples = Device().samples()
        found = {"decode alone": Errors(0.02 if is_good else 0.31, 0.05, 0.4, 3)}
        made = Calibration({"device": "a GPU"}, fit.fit(samples, "made up"), found, samples, 12.3)
        monkeypatch.setattr("vllm_pdmux.cli.calibrate._engine", Nothing)
        monkeypatch.setattr("vllm_pdmux.calibration.run.calibrate", lambda llm, progress: made)
        out = tmp_path / "profile.json"
        assert main(["calibrate", "--model", "m", "--force", "--json", "--out", str(out)]) == (0 if is_good else 1)
        said = capfd.readouterr()
        answer = json.loads(said.out)
        assert answer["errors"]["decode alone"] == asdict(found["decode alone"]) and answer["measured_s"] == 12.3
        assert out.exists() == bool(answer["stored"]) == cache_folder.exists() == is_good
        if is_good:
            assert read_profile(str(out)) == read_profile(answer["stored"]) == made.profile
        else:
            assert (
                "vllm-pdmux calibrate: not stored: the median error of decode alone is 31.0% but must be at most 10%: "
                "calibrate again when nothing else uses the device" in said.err
            )
            assert f"vllm-pdmux calibrate: --out {out} is not written either" in said.err

    @pytest.mark.parametrize("good", [[True], [False, True], [False, False]])
    def test_what_is_refused_is_measured_once_more(self, capfd, cache_folder, monkeypatch, good):
        samples = Device().samples()
        profile, left = fit.fit(samples, "made up"), list(good)

        def measured(llm, progress):
            errors = {"decode alone": Errors(0.02 if left.pop(0) else 0.31, 0.05, 0.4, 3)}
            return Calibration({"device": "a GPU"}, profile, errors, samples, 12.3)

        monkeypatch.setattr("vllm_pdmux.cli.calibrate._engine", Nothing)
        monkeypatch.setattr("vllm_pdmux.calibration.run.calibrate", measured)
        assert main(["calibrate", "--model", "m", "--force"]) == (0 if good[-1] else 1)
        said = capfd.readouterr().err
        again = "measuring once more: the median error of decode alone is 31.0% but must be at most 10%"
        assert left == [] and cache_folder.exists() == good[-1] and (again in said) == (len(good) > 1)


class Nothing:
    """In the place of an engine."""

    def __init__(self, arguments):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *args):
        pass


# --- a real engine ----------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def arrivals():
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY) for i in range(3)]
    return [*chats, *(Arrival(f"long{i}", prompt(150 + 30 * i, 100 + i), GREEDY, 8 + 9 * i) for i in range(3))]


@pytest.fixture
def few_steps(monkeypatch):
    """What is measured does not matter, only that it is."""
    for name, value in {"ALONE_STEPS": 5, "BESIDE_STEPS": 3, "PREFILL_REPEATS": 1}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "BESIDE_MS_LIMITS", (0.0, 0.0))


@pytest.mark.engine
def test_every_point_is_measured_and_the_engine_is_as_before(
    start_engine, tiny_model_path, stock, few_steps, monkeypatch
):
    """On a CPU divisions are only numbers, but the lanes are real."""
    engine = start_engine(tiny_model_path, pdmux={"policy": "slo", "sm_group_num": 4})
    monkeypatch.setattr(measure, "divisions", lambda settings: DIVISIONS)
    policy, work = engine.scheduler._pdmux_policy, engine.scheduler._prompt_work
    told, alone, slow = [], [], iter([500.0, 30.0])
    prefill_alone = measure.Meter._prefill_alone

    def measured(meter, *tokens):
        """The first point is long, and the host is slow when the second one is measured first."""
        alone.append((tokens, replace(prefill_alone(meter, *tokens), ms=next(slow, 20.0))))
        return alone[-1][1]

    monkeypatch.setattr(measure.Meter, "_prefill_alone", measured)
    made = calibrate(engine.llm, lambda done, total, what: told.append((done, total)))
    samples = made.samples
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] == len(told) - 1
    assert {(one.group, one.load) for one in samples.beside} == {(g, n) for g in (1, 2) for n in range(4)}
    assert all(one.prompt_tokens == 256 and one.prefill_tokens_per_s > 1 for one in samples.beside)
    assert {one.chunk_tokens for one in samples.fused} == {32}
    assert all(one.context_tokens >= one.batch * 32 for one in samples.decode)
    limits = plan.Limits(512, 16, 256, 256, 256 * 32, 32)
    assert [one.batch for one in samples.decode] == [load.batch for load in plan.decode_loads(limits)]
    # What was to be reused is not computed.
    points = plan.prompts(limits)
    assert [(one.new_tokens, one.reused_tokens) for one in samples.prefill] == points
    assert [tokens for tokens, _ in alone] == [*points, *points[1:]], "what is short is measured once more at the end"
    assert [one.ms for one in samples.prefill] == [500.0, *([20.0] * (len(points) - 1))]
    assert made.profile.groups[1].label == "disjoint 84:48"
    assert engine.scheduler._pdmux_policy is policy and engine.scheduler._prompt_work is work
    engine.assert_nothing_left()
    assert_same(engine.run(arrivals()), stock.run(arrivals()))
    engine.assert_nothing_left()


@pytest.mark.parametrize("slow", [(), (4,), (0,)], ids=["none", "one that is alone", "one beside prefill"])
def test_decode_that_would_have_it_refused_is_measured_once_more(pdmux_engine, monkeypatch, slow):
    """Where nothing else was measured with it: of a load beside prefill the rest would be of another moment."""
    monkeypatch.setattr(measure, "divisions", lambda settings: DIVISIONS)
    start, started = measure.Meter._start, []

    def timed(meter, load):
        found = start(meter, load)
        started.append(load)
        ms = 5.0 + 0.5 * load.batch + 1e-3 * found.context_tokens
        is_slow = loads.index(load) in slow and started.count(load) == 1
        return replace(found, batch=load.batch, ms=ms * 1.3 if is_slow else ms)

    loads = plan.decode_loads(plan.Limits(512, 16, 256, 256, 256 * 32, 32))
    monkeypatch.setattr(measure.Meter, "_start", timed)
    monkeypatch.setattr(measure.Meter, "_renew", lambda *_: None)
    made = calibrate(pdmux_engine.llm)
    assert started[: len(loads)] == loads
    assert started[len(loads) :] == (loads[4:] if slow else [])
    assert [one.batch for one in made.samples.decode] == [load.batch for load in loads]
    assert bool(too_large({"decode alone": made.errors["decode alone"]})) == (slow == (0,))
    pdmux_engine.assert_nothing_left()


class Asynchronous:
    """What calibration uses of a ``vllm.LLM``, over an engine core of `async_engine`."""

    def __init__(self, engine):
        self._engine = engine
        self.llm_engine, self.vllm_config = self, engine.core.vllm_config
        self.engine_core = SimpleNamespace(engine_core=engine.core)

    def add_request(self, name, prompt, params):
        tokens, hasher = prompt["prompt_token_ids"], self._engine.core.request_block_hasher
        self._engine.core.add_request(Request(name, tokens, params, None, block_hasher=hasher))

    def abort_request(self, names):
        self._engine.core.abort_requests(names)

    def step(self):
        outputs = [output for client in self._engine._step().values() for output in client.outputs]
        return [SimpleNamespace(request_id=one.request_id, finished=one.finish_reason is not None) for one in outputs]


@pytest.mark.engine
@pytest.mark.parametrize(("use_v2", "report_delay", "batches"), [(False, 1, 1), (True, 0, 2), (True, 2, 2)])
def test_under_asynchronous_scheduling_as_on_a_gpu(
    tiny_model_path, few_steps, monkeypatch, use_v2, report_delay, batches
):
    monkeypatch.setattr(async_engine, "BLOCKS", 256)
    monkeypatch.setattr(measure, "divisions", lambda settings: DIVISIONS)
    engine = async_engine.Engine(tiny_model_path, {"policy": "slo", "sm_group_num": 4, "calibration": "off"}, use_v2)
    engine.worker.slow_device.delay, engine.scheduler._admission.max_batches = report_delay, batches
    samples = calibrate(Asynchronous(engine)).samples
    assert {(one.group, one.load) for one in samples.beside} == {(g, n) for g in (1, 2) for n in range(4)}
    limits = plan.Limits(512, 16, 256, 256, 256 * 32, 32)
    assert [(one.new_tokens, one.reused_tokens) for one in samples.prefill] == plan.prompts(limits)
    assert samples.fused
    engine.assert_nothing_left()


@pytest.mark.engine
def test_an_engine_that_cannot_be_measured_says_why(stock_engine, pdmux):
    with pytest.raises(CalibrationError, match="the engine is stock vLLM: give it additional_config="):
        calibrate(stock_engine.llm)
    pdmux.add(Arrival("busy", prompt(20, 1), GREEDY))
    with pytest.raises(CalibrationError, match="the engine serves 1 requests: calibrate when it is idle"):
        calibrate(pdmux.llm)
    pdmux.abort("busy")
    pdmux.settle()


COMMAND = """
import sys
from vllm_pdmux.calibration import fit
fit.MEDIAN_LIMIT = fit.P95_LIMIT = 1e9  # a busy machine is no failure of the test
from vllm_pdmux.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_from_the_command_to_an_engine_that_uses_it(start_engine, tiny_model_path, stock, cache_folder, caplog_vllm):
    limits = ["--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
    engine = ["--model", tiny_model_path, "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.2"]

    def run(*more):
        command = [sys.executable, "-c", COMMAND, "calibrate", *engine, *limits, "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return json.loads(done.stdout)

    first, again = run(), run()
    assert not first["cached"] and first["measured_s"] > 0 and again["cached"] and again["measured_s"] == 0
    assert first["stored"] == again["stored"] and first["profile"] == again["profile"]
    assert set(first["errors"]) == {"decode alone", "prefill alone"}
    assert Path(first["stored"]).parent == cache_folder

    with caplog_vllm.at_level(logging.INFO, logger="vllm.pdmux.scheduler"):
        served = start_engine(tiny_model_path, pdmux={"itl_slo_ms": 1000.0, "calibration": "auto"})
    assert f"calibration: {first['profile']['name']}, from {first['stored']}" in caplog_vllm.text
    policy = served.scheduler._pdmux_policy
    assert policy._alone.is_known and policy._full_rate.value
    assert_same(served.run(arrivals()), stock.run(arrivals()))
    served.assert_nothing_left()

    with caplog_vllm.at_level(logging.INFO, logger="vllm.pdmux.scheduler"):
        start_engine(tiny_model_path, pdmux={"policy": "slo", "calibration": "auto"}, dtype="bfloat16")
    assert "no calibration for LlamaForCausalLM with 8 layers of 128 in bfloat16 on " in caplog_vllm.text
    assert "learning from serving; `vllm-pdmux calibrate` would make one" in caplog_vllm.text


def test_a_user_without_a_home_has_a_cache_too(monkeypatch):
    from vllm_pdmux.cache_folder import cache_dir

    for name in ("HOME", "PDMUX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user that is not known
    assert cache_dir().is_absolute() and cache_dir().name == "vllm_pdmux"


def test_a_profile_with_numbers_without_end_is_none(tmp_path):
    from vllm_pdmux.simulator import ProfileError

    known = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-h200-llama-8b.json"
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**json.loads(known.read_text()), "prefill_ms_per_token": float("inf")}))
    with pytest.raises(ProfileError, match="prefill_ms_per_token"):
        read_profile(str(file))


def test_two_loads_that_contradict_each_other_are_refused():
    decode = [DecodeSample(b, c, 1.0 + 0.01 * b + 1e-5 * c) for b, c in ((1, 100), (8, 1000), (16, 4000), (32, 16000))]
    prefill = [PrefillSample(tokens, 0, 0.1 * tokens) for tokens in (64, 128, 256, 512)]
    beside = [
        BesideSample(1, number, batch, context, 512, 1.1 * slowdown, rate, 1.1)
        for number, (batch, context, slowdown, rate) in enumerate([(8, 1000, 1.2, 5000.0), (9, 1100, 6.0, 250.0)])
    ]
    samples = Samples(tuple(decode), tuple(prefill), tuple(beside), (), (Division("capped", 84, 48),), 10_000)
    assert any("beside" in problem for problem in too_large(held_out_errors(samples)))
