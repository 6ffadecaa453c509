# SPDX-License-Identifier: Apache-2.0
"""The simulator: times that can be checked by hand, policies compared on one device, traces in both forms."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pdmux.cli import main
from vllm_pdmux.cli.simulate import slo
from vllm_pdmux.policy import ALL_LAYERS, FixedPolicy, LayerRule
from vllm_pdmux.simulator import (
    Arrival,
    DeviceProfile,
    GroupProfile,
    ProfileError,
    Stock,
    TraceError,
    read_trace,
    simulate,
    steady,
)
from vllm_pdmux.simulator.profile import read_profile

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-h200-llama-8b.json"
EVEN = GroupProfile(sharing="capped", prefill_sms=66, decode_sms=66, slowdown=1.5, pace=0.5)
PLAIN = DeviceProfile(
    name="a device of round numbers",
    decode_fixed_ms=10,
    decode_ms_per_request=0,
    decode_ms_per_context_token=0,
    prefill_fixed_ms=0,
    prefill_ms_per_token=0.1,
    prefill_ms_per_token_pair=0,
    fused_parts=(1.0, 1.0, 1.0),
    fused_prompt=1.0,
    kv_tokens=100_000,
    groups=(EVEN,),
)


def fixed(group=1, groups=1):
    return FixedPolicy(group, groups, LayerRule(layers_per_group=ALL_LAYERS))


class TestByHand:
    def test_a_request_alone_takes_its_prompt_and_its_steps(self):
        for arm in (Stock(), fixed()):
            result = simulate(PLAIN, [Arrival(0, 1000, 11)], arm)
            assert result.ttft_ms == [100] and result.tpot_ms == [10] and result.makespan_ms == 200
            assert result.gaps_ms == [(10, 1)] * 10

    def test_stock_lets_the_running_request_wait_for_the_whole_chunk(self):
        result = simulate(PLAIN, [Arrival(0, 100, 50), Arrival(100, 1000, 2)], Stock())
        assert max(gap for gap, _ in result.gaps_ms) == 110  # the prompt's 100 ms and the step's own 10
        assert sorted(result.ttft_ms) == [10, 110]

    def test_a_smaller_chunk_spreads_it_over_steps(self):
        result = simulate(PLAIN, [Arrival(0, 100, 50), Arrival(100, 1000, 2)], Stock(chunk_tokens=251))
        assert [gap for gap, _ in result.gaps_ms if gap > 10] == [35] * 4

    def test_a_lane_slows_each_step_by_the_slowdown_and_takes_longer_by_the_pace(self):
        result = simulate(PLAIN, [Arrival(0, 100, 50), Arrival(100, 1000, 2)], fixed())
        slow = [gap for gap, _ in result.gaps_ms if gap > 10]
        # 100 ms of prefill at half its pace in steps of 15 ms, the last of which is one third beside it.
        # It is in the step after the next one, so its second token comes two steps after the first.
        assert slow[:13] == [15] * 13 and slow[13:] == pytest.approx([10 + 5 / 3, 20])
        assert result.residency_ms[1] == pytest.approx(195 + 10 + 5 / 3)
        assert sorted(result.ttft_ms) == pytest.approx([10, 195 + 10 + 5 / 3])

    def test_a_long_prompt_goes_through_the_lane_in_batches(self):
        whole = simulate(PLAIN, [Arrival(0, 100, 100), Arrival(50, 2000, 2)], fixed(), max_prefill_tokens=2000)
        parts = simulate(PLAIN, [Arrival(0, 100, 100), Arrival(50, 2000, 2)], fixed(), max_prefill_tokens=500)
        assert max(parts.ttft_ms) >= max(whole.ttft_ms)
        assert sum(parts.residency_ms.values()) == pytest.approx(sum(whole.residency_ms.values()), rel=0.1)

    def test_what_is_in_the_cache_is_not_prefilled_again(self):
        first, again = Arrival(0, 1024, 2, (1, 2)), Arrival(1000, 1024, 2, (1, 2))
        assert simulate(PLAIN, [first, again], Stock()).ttft_ms == pytest.approx([102.4, 0.1])
        small = PLAIN.model_copy(update={"kv_tokens": 512})
        assert simulate(small, [first, again], Stock()).ttft_ms == pytest.approx([102.4, 102.4])

    def test_there_are_only_so_many_seats(self):
        arrivals = [Arrival(0, 10, 20) for _ in range(6)]
        assert max(count for _, count in simulate(PLAIN, arrivals, Stock(), max_num_seqs=4).gaps_ms) == 4

    def test_targets_count_the_requests_that_meet_both(self):
        arrivals = [Arrival(0, 1000, 11), Arrival(1000, 3000, 11)]
        assert simulate(PLAIN, arrivals, Stock(), ttft_slo_ms=200, tpot_slo_ms=10).met == 1
        assert simulate(PLAIN, arrivals, Stock(), ttft_slo_ms=400, tpot_slo_ms=9).met == 0


@pytest.mark.parametrize("arm", ["stock", "fixed", "slo"])
@given(data=st.data())
def test_every_request_ends_once_and_no_time_is_lost(arm, data):
    profile = read_profile(str(MEASURED))
    made = st.builds(Arrival, st.floats(0, 5000), st.integers(1, 9000), st.integers(1, 60))
    arrivals = sorted(data.draw(st.lists(made, min_size=1, max_size=12)), key=lambda one: one.at_ms)
    policy = {"stock": Stock(512), "fixed": fixed(2, len(profile.groups)), "slo": slo(profile, 20.0)}[arm]
    result = simulate(profile, arrivals, policy, max_num_seqs=8)
    assert len(result.ttft_ms) == len(arrivals) == result.met
    assert min(result.ttft_ms) > 0
    waited = sum(count for _, count in result.gaps_ms)
    assert waited == sum(arrival.answer_tokens - 1 for arrival in arrivals)
    assert result.makespan_ms * 8 >= sum(gap * count for gap, count in result.gaps_ms)  # each seat at most all of it


@pytest.mark.parametrize(("rate", "itl_ms"), [(2, 12), (4, 15), (4, 25), (5, 40)])
def test_the_slo_policy_meets_as_many_as_the_best_division_in_hindsight(rate, itl_ms):
    profile = read_profile(str(MEASURED))
    arrivals = steady(rate, 400, 3000, 200)
    targets = {"ttft_slo_ms": 1500, "tpot_slo_ms": itl_ms}
    learned = simulate(profile, arrivals, slo(profile, itl_ms), **targets)
    groups = len(profile.groups)
    best = max(simulate(profile, arrivals, fixed(group, groups), **targets).met for group in range(1, groups + 1))
    assert learned.met >= best - 0.03 * len(arrivals)
    assert learned.itl_ms(0.97) <= itl_ms


@pytest.mark.parametrize("itl_ms", [1.0, 12.0, 60.0])
def test_neither_lane_starves_whatever_the_target(itl_ms):
    profile = read_profile(str(MEASURED))
    arrivals = steady(3, 200, 6000, 150)
    result = simulate(profile, arrivals, slo(profile, itl_ms))
    assert len(result.ttft_ms) == len(arrivals)
    slowest = max(group.slowdown for group in profile.groups)
    longest_alone = profile.decode_ms(256, 256 * 6200)
    assert max(gap for gap, _ in result.gaps_ms) <= max(slowest * longest_alone, 2 * itl_ms)
    assert result.longest_lane_wait_ms <= slowest * longest_alone


def test_short_prompts_do_not_wait_for_a_long_one_that_is_late_anyway():
    profile = read_profile(str(MEASURED))
    chat = Arrival(0, 100, 3000)
    arrivals = [chat, Arrival(500, 100_000, 10), *(Arrival(1500 + 700 * i, 200, 10) for i in range(8))]

    def worst(ttft_slo_ms):
        result = simulate(profile, arrivals, slo(profile, 20.0, ttft_slo_ms))
        return sorted(result.ttft_ms)

    in_order, by_slack = worst(None), worst(2000.0)
    assert by_slack[-1] < 1.3 * in_order[-1]  # the long one
    assert in_order[-2] > 0.5 * in_order[-1] and by_slack[-2] < 0.1 * by_slack[-1]


class TestTraces:
    def test_azure(self, tmp_path):
        file = tmp_path / "azure.csv"
        file.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
            "2023-11-16 18:17:04.9799600,3180,0\n2023-11-16 18:17:05.0000000,1,2\n"
        )
        assert read_trace(str(file), limit=2, speed=2.0) == [Arrival(0, 4808, 10), Arrival(500, 3180, 1)]

    def test_mooncake(self, tmp_path):
        file = tmp_path / "mooncake.jsonl"
        rows = [
            {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [4, 5]},
            {"timestamp": 1000, "input_length": 10, "output_length": 6},
        ]
        file.write_text("\n".join(map(json.dumps, rows)))
        assert read_trace(str(file)) == [Arrival(0, 10, 6), Arrival(2000, 600, 5, (4, 5))]

    def test_requests_of_one_time_of_mooncake_arrive_evenly_until_the_next(self, tmp_path):
        file = tmp_path / "mooncake.jsonl"
        times_ms = (0, 0, 0, 3000, 6000, 6000)
        file.write_text("\n".join(json.dumps(dict(timestamp=at, input_length=1, output_length=1)) for at in times_ms))
        assert [one.at_ms for one in read_trace(str(file))] == [0, 1000, 2000, 3000, 6000, 7500]
        file.write_text("\n".join(json.dumps(dict(timestamp=at, input_length=1, output_length=1)) for at in (5, 5)))
        assert [one.at_ms for one in read_trace(str(file))] == [0, 0]

    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n", "request 1 is wrong .* CSV with TIMESTAMP"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,6\n", "request 1 is wrong"),
            ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}\n{}', "request 2 is wrong .* JSONL"),
            ("a.jsonl", "", "has no requests"),
        ],
    )
    def test_what_is_no_trace_is_named(self, tmp_path, name, text, problem):
        (tmp_path / name).write_text(text)
        with pytest.raises(TraceError, match=problem):
            read_trace(str(tmp_path / name))

    def test_a_file_that_is_not_there_is_named(self):
        with pytest.raises(TraceError, match=r"nowhere\.csv: cannot be read"):
            read_trace("nowhere.csv")

    def test_steady_arrivals_have_their_rate(self):
        arrivals = steady(5, 4000, 10, 20)
        assert arrivals[-1].at_ms == pytest.approx(4000 / 5 * 1e3, rel=0.05)


class TestProfile:
    def test_the_committed_one_says_how_wrong_it_is(self):
        errors = json.loads(MEASURED.read_text())["errors"]
        beside = {"decode beside prefill", "prefill beside decode"}
        assert set(errors) == {"decode alone", "prefill alone", "fused step"} | beside
        assert read_profile(str(MEASURED)).prompt_work.doubling_tokens == pytest.approx(26_000, rel=0.05)

    def test_without_pairs_work_is_tokens(self):
        assert math.isinf(PLAIN.prompt_work.doubling_tokens)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [("{", "is not JSON"), ("{}", "name: Field required"), ('{"name": 5}', "name: .*string")],
    )
    def test_what_is_no_profile_is_named(self, tmp_path, text, problem):
        file = tmp_path / "profile.json"
        file.write_text(text)
        with pytest.raises(ProfileError, match=f"profile {file}: {problem}"):
            read_profile(str(file))

    @pytest.mark.parametrize("path", ["a\0b", "\ud800"])
    def test_a_path_that_can_be_none_cannot_be_read(self, path):
        with pytest.raises(ProfileError, match=r"cannot be read \(.*\): correct path or rights") as caught:
            read_profile(path)
        assert str(caught.value).isprintable()


class TestCommand:
    ARGUMENTS = ["simulate", "--profile", str(MEASURED), "--rate", "2", "--requests", "60"]

    def test_every_arm_has_its_numbers(self, capsys):
        assert main([*self.ARGUMENTS, "--itl-slo-ms", "15", "--chunks", "512,2048", "--json"]) == 0
        arms = json.loads(capsys.readouterr().out)["arms"]
        assert [arm["arm"] for arm in arms][:3] == ["stock, chunk 512", "stock, chunk 2048", "capped 100:32"]
        assert arms[-1]["arm"] == "slo" and len(arms) == 9
        for arm in arms:
            assert 0 < arm["ttft_p50_ms"] <= arm["ttft_p99_ms"] and 0 < arm["itl_p50_ms"] <= arm["itl_p99_ms"]
            assert sum(arm["residency"].values()) == pytest.approx(1)

    @pytest.mark.parametrize("requests", ["1", "2", "3", "7"])
    def test_of_few_requests_the_p99_is_the_slowest(self, capsys, requests):
        assert main([*self.ARGUMENTS, "--requests", requests, "--chunks", "256", "--json"]) == 0
        for arm in json.loads(capsys.readouterr().out)["arms"]:
            assert arm["ttft_p50_ms"] <= arm["ttft_p99_ms"]

    def test_without_a_target_nothing_is_within_one(self, capsys):
        for target, is_said in (([], False), (["--ttft-slo-ms", "1"], True)):
            assert main([*self.ARGUMENTS, *target, "--json"]) == 0
            arms = json.loads(capsys.readouterr().out)["arms"]
            assert [arm["met_share"] for arm in arms] == [0.0 if is_said else None] * len(arms)

    def test_people_get_a_table(self, capsys):
        assert main(self.ARGUMENTS) == 0
        said = capsys.readouterr().out
        assert "60 requests" in said and "TTFT" in said and "slo" in said

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["--profile", "nowhere.json", "--rate", "1"], "profile nowhere.json: cannot be read"),
            (["--profile", str(MEASURED)], "give either --trace FILE or --rate"),
            (["--profile", str(MEASURED), "--rate", "1", "--trace", "x.csv"], "give either --trace FILE or --rate"),
            (["--profile", str(MEASURED), "--rate", "-1"], "--rate: is '-1' but must be a number above 0"),
            (
                ["--profile", str(MEASURED), "--rate", "1", "--chunks", "512,0"],
                "--chunks has 0 but each must be at least",
            ),
            (["--profile", str(MEASURED), "--rate", "1", "--speed", "2"], "--speed is 2 but there is no trace"),
            (
                ["--profile", str(MEASURED), "--rate", "1", "--prompt-tokens", "10000000"],
                "a request has 10,000,256 tokens but the profile's KV cache holds",
            ),
            (["--profile", str(MEASURED), "--rate", "1", "--chunks", "a"], "--chunks is 'a'"),
            (["--profile", str(MEASURED), "--trace", "nowhere.csv"], "trace nowhere.csv: cannot be read"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, capsys, arguments, problem):
        assert main(["simulate", *arguments]) == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1
