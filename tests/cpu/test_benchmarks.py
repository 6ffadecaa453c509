# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, at a size that says nothing of speed, so that they do not rot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_handover_benchmark_measures_all_ways_of_a_prefill(tiny_model_path, tmp_path):
    out = tmp_path / "handover.json"
    command = [sys.executable, "handover.py", "--model", tiny_model_path, "--tokens", "64", "--repeats", "1"]
    run = subprocess.run([*command, "--out", str(out)], cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    results = json.loads(out.read_text())
    assert results["handover_us"]["count"] > 1000
    assert set(results["prefill_alone_ms"]) == set(results["slower_than_stock"])
    assert all(times["repeats"] == 1 and times["median"] > 0 for times in results["prefill_alone_ms"].values())
    assert results["machine"]["cores"] and results["versions"] and "handover.py" in results["command"]


def test_the_frontier_takes_turns_between_the_engines(tmp_path):
    out = tmp_path / "frontier.json"
    shape = ["--shape", "toy", "--cells", "3:64:200", "--prompts", "3", "--kv-gib", "1"]
    settings = ["--chunks", "32,64", "--groups", "capped:100", "--slo", "50", "--calibrate", "--rounds", "2"]
    command = [sys.executable, "frontier.py", *shape, *settings, "--out", str(out)]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    results = json.loads(out.read_text())
    order = [("stock", 32), ("pdmux", "capped:100"), ("stock", 64), ("pdmux", "slo:50")]
    assert [(row["arm"], row["setting"]) for row in results["rows"]] == order * 2
    assert all(row["itl_alone_ms"] > 0 and row["prefill_tokens_per_s"] > 0 for row in results["rows"])
    assert all(row["steady_tokens_per_s"] > 0 for row in results["rows"])
    assert all(arm["kv_tokens"] > 0 and arm["ready_s"] > 0 for arm in results["arms"].values())
    assert results["calibration"]["profile"]["name"] and results["calibration"]["measured_s"] > 0
    assert "frontier.py" in results["command"]


def test_a_replay_serves_a_trace_in_every_arm(tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "replay.json"
    rows = [f"2023-11-16 18:15:{second:02d}.0000000,{tokens},5" for second, tokens in ((0, 40), (1, 200), (2, 900))]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    profile = BENCHMARKS / "results" / "profile-h200-llama-8b.json"
    load = ["--trace", trace, "--speed", "2", "--seconds", "5", "--targets", "60000:60000,1:1", "--longest", "800"]
    arms = [
        "--shape",
        "toy",
        "--stock",
        "64",
        "--groups",
        "capped:100",
        "--kv-gib",
        "1",
        "--calibrate",
        "--profile",
        profile,
    ]
    command = [sys.executable, "replay.py", *map(str, load + arms), "--out", str(out)]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    results = json.loads(out.read_text())
    settings = [64, "capped:100", "slo:60000:60000", "slo:1:1"]
    assert [row["setting"] for row in results["rows"]] == settings
    for row in results["rows"]:
        assert row["requests"] == 2 and row["tokens"] == 10, "the third request is longer than 800 tokens"
        assert set(row["within"]["60000:60000"].values()) == {1.0} and row["within"]["1:1"]["tpot_ms"] == 0.0
    assert all(row["predicted"]["within"]["60000:60000"] == 1.0 for row in results["rows"])
    assert all(sum(kind["steps"] for kind in row["steps"].values()) > 0 for row in results["rows"][2:])


def test_the_tax_is_measured_in_turns(tmp_path):
    out = tmp_path / "tax.json"
    loads = ["--decode", "3:64", "--steps", "10", "--prompt", "200", "--low", "20:3:100:4", "--rounds", "2"]
    command = [sys.executable, "tax.py", "--shape", "toy", "--kv-gib", "1", "--group", "capped:100", *loads]
    run = subprocess.run([*command, "--out", str(out)], cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads(out.read_text())
    assert [row["arm"] for row in found["rows"]] == (["stock"] * 3 + ["pdmux"] * 3) * 2
    assert all(row["answered"] == 3 for row in found["rows"] if row["load"].startswith("low"))
    assert [(line["load"].split()[0], line["what"]) for line in found["summary"]] == [
        ("decode", "itl_p50_ms"),
        ("decode", "itl_p99_ms"),
        ("decode", "cpu_ms_per_step"),
        ("prompt", "ttft_p50_ms"),
        ("low", "ttft_p50_ms"),
        ("low", "itl_p50_ms"),
    ]
    assert all(line["stock"]["repeats"] == line["pdmux"]["repeats"] == 2 for line in found["summary"])
    assert all(line["times_stock"] > 0 for line in found["summary"])
    assert set(found["arms"]) == {"stock", "pdmux"} and found["machine"] and "tax.py" in found["command"]


def test_how_the_lanes_slow_each_other_down_is_read_from_what_was_measured():
    files = sorted(map(str, (BENCHMARKS / "results").glob("frontier-*.json")))
    command = [sys.executable, "interference.py", *files]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines()[2:]]
    assert len(rows) == 24  # six divisions in four cells
    by_row = {(division, cell): list(map(float, numbers)) for division, cell, *numbers in rows}
    alone_ms, decode, prefill, both = by_row["disjoint:84", "32:2048:8192"]
    assert (alone_ms, decode) == (7.0, pytest.approx(12.7 / 7.0, abs=0.02))
    assert prefill == pytest.approx(8192 / 0.2175 / 22477, abs=0.03)
    assert both == pytest.approx(1 / decode + 1 / prefill, abs=0.01)


TOGETHER = "--shape toy --groups capped:100 --kv-gib 1"


def together(*commands):
    command = [sys.executable, "together.py", *commands]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)


def test_benchmarks_together_start_their_engines_once_and_one_that_fails_stops_none(tmp_path):
    trace, out = tmp_path / "trace.csv", [tmp_path / name for name in ("wrong.json", "frontier.json", "replay.json")]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0000000,40,5\n")
    replay = f"replay --trace {trace} --speed 1 --seconds 1 --targets 60000:60000 --stock 64 {TOGETHER} --out {out[2]}"
    frontier = f"frontier --cells 3:64:200 --prompts 2 --chunks 32 --rounds 1 {TOGETHER} --out"
    too_long = frontier.replace("3:64:200", "3:64:100000")
    run = together(f"{too_long} {out[0]}", f"{frontier} {out[1]}", replay)
    assert run.returncode == 1 and run.stderr.count("together.py: frontier ") == 1, run.stderr[-3000:]
    assert not out[0].exists()
    for file, name, rows in ((out[1], "frontier.py", 2), (out[2], "replay.py", 3)):
        found = json.loads(file.read_text())
        assert len(found["rows"]) == rows and name in found["command"]
    assert json.loads(out[1].read_text())["arms"]["stock"]["ready_s"] > 0


@pytest.mark.parametrize(
    ("commands", "problem"),
    [
        (["handover --tokens 5"], "a command begins with handover: it must be one of frontier, replay"),
        (["frontier --kv-gib 2", "frontier --kv-gib 3"], "--kv-gib is 2.0 and 3.0 in two commands"),
        (["frontier --groups capped:84", "frontier"], "--groups is capped:84 and capped:100,"),
    ],
)
def test_benchmarks_that_cannot_be_together_are_named(commands, problem):
    run = together(*commands)
    assert run.returncode == 2 and problem in run.stderr


def test_two_engines_cannot_both_have_all_memory(tmp_path):
    command = [sys.executable, "replay.py", "--trace", "trace.csv", "--speed", "1"]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and "--kv-gib is not given, and two engines would both take all memory" in run.stderr


def test_a_sweep_simulates_every_case(tmp_path):
    rows = [f"2023-11-16 18:15:{second:02d}.0000000,3000,20" for second in range(20)]
    (tmp_path / "made-up.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    profile, out = BENCHMARKS / "results" / "profile-h200-llama-8b.json", tmp_path / "sweep.json"
    options = ["--profile", profile, "--traces", tmp_path, "--speeds", "made-up.csv=1:4", "--targets", "12:1000,1:1"]
    command = [sys.executable, "sweep.py", *map(str, options), "--out", str(out)]
    subprocess.run(command, cwd=BENCHMARKS, capture_output=True, timeout=120, check=True)
    found = json.loads(out.read_text())["rows"]
    assert [(row["speed"], row["itl_slo_ms"]) for row in found] == [(1, 12), (1, 1), (4, 12), (4, 1)]
    assert [row["slo"] for row in found] == [1.0, 0.0, 1.0, 0.0]
    for row in found:
        assert row["best_division"] == max(row["divisions"].values()) and len(row["divisions"]) == 6
        assert row["best_chunk"] == max(row["chunks"].values()) and len(row["chunks"]) == 5


def test_goodput_of_real_servers(tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "goodput.json"
    rows = [f"2023-11-16 18:15:{second:02d}.0000000,{60 + 40 * second},5" for second in range(9)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    load = ["--trace", trace, "--speeds", "1,4", "--seconds", "2", "--targets", "60000:60000,1:1", "--shape", "toy"]
    arms = ["--arm", "stock --max-num-batched-tokens 256", "--arm", 'pdmux {"layers_per_group": 2}']
    options = "--max-model-len 1024 --enforce-eager --max-num-seqs 8 --gpu-memory-utilization 0.1"
    how = ["--at-once", "--rounds", "2", "--clients", "2"]
    command = [sys.executable, "goodput.py", *map(str, load), *arms, *how, "--options", options, "--out", str(out)]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300, env=environ)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads(out.read_text())
    turns = [("stock", 1), ("pdmux", 1), ("stock", 4), ("pdmux", 4)]
    assert [(row["arm"].split()[0], row["speed"]) for row in found["rows"]] == turns * 2
    assert [row["round"] for row in found["rows"]] == [0] * 4 + [1] * 4
    for row in found["rows"]:
        assert row["answered"] == {1: 3, 4: 9}[row["speed"]] and row["errors"] == []
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] and 0 < row["itl_p50_ms"] <= row["itl_max_ms"]
        assert row["within"] == {
            "60000:60000": {"tpot": 1.0, "itl_p95": 1.0},
            "1:1": {"tpot": 0.0, "itl_p95": 0.0},
        }
    for arm in found["arms"]:
        reached = arm["goodput"]["trace.csv"]
        assert reached["60000:60000"]["tpot"]["0.99"] == 4.5 and reached["1:1"]["tpot"]["0.95"] == 0
        assert arm["ready_s"] > 0


def test_goodput_is_the_rate_below_which_all_speeds_keep_the_targets():
    sys.path.insert(0, str(BENCHMARKS))
    from goodput import goodput

    shares = [(1.0, 1.0), (0.99, 0.96), (0.94, 0.9), (1.0, 1.0)]  # the last one is luck
    rows = [
        {"requests_per_s": 2.0 * number, "within": {"12:1000": {"tpot": tpot, "itl_p95": itl}}}
        for number, (tpot, itl) in enumerate(shares, start=1)
    ]
    # A second round of the highest speed that keeps 95 %: what counts is both rounds' requests.
    rows.append({"requests_per_s": 4.0, "within": {"12:1000": {"tpot": 0.93, "itl_p95": 0.94}}})
    found = goodput(rows, [(12.0, 1000.0)])["12:1000"]
    assert found == {"tpot": {"0.95": 4.0, "0.99": 2.0}, "itl_p95": {"0.95": 4.0, "0.99": 2.0}}
    found = goodput(rows[:-1], [(12.0, 1000.0)])["12:1000"]
    assert found == {"tpot": {"0.95": 4.0, "0.99": 4.0}, "itl_p95": {"0.95": 4.0, "0.99": 2.0}}


@pytest.mark.parametrize(
    ("arm", "problem"),
    [
        ("vanilla", "--arm is 'vanilla' but must be 'stock [OPTIONS]' or 'pdmux JSON [OPTIONS]'"),
        ("pdmux itl_slo_ms=12", "what follows pdmux must be its settings as JSON"),
    ],
)
def test_an_arm_that_is_none_is_named(arm, problem):
    command = [sys.executable, "goodput.py", "--trace", "t.csv", "--speeds", "1", "--arm", arm]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and problem in run.stderr


def test_equal_hashes_of_a_trace_are_equal_tokens():
    sys.path.insert(0, str(BENCHMARKS))
    from arrivals import BLOCK_TOKENS, Request

    one = Request(0.0, 3 * BLOCK_TOKENS, 5, [7, 8, 9]).prompt(0, 1000)
    other = Request(0.0, 2 * BLOCK_TOKENS + 50, 5, [7, 8, 10]).prompt(1, 1000)
    assert len(one) == 3 * BLOCK_TOKENS and len(other) == 2 * BLOCK_TOKENS + 50
    assert one[: 2 * BLOCK_TOKENS] == other[: 2 * BLOCK_TOKENS] and one[2 * BLOCK_TOKENS :][:50] != other[-50:]
    assert Request(0.0, 100, 5, []).prompt(0, 1000) != Request(0.0, 100, 5, []).prompt(1, 1000)


def test_requests_within_targets_are_those_that_were_answered_in_time():
    sys.path.insert(0, str(BENCHMARKS))
    from arrivals import Request, Seen, share_within, summary

    quick, slow, unanswered = Seen(), Seen(), Seen()
    for now_ms, tokens in ((50.0, 1), (60.0, 2), (70.0, 3)):
        quick.token(now_ms, tokens)
        slow.token(now_ms * 10, tokens)
    unanswered.token(50.0, 1)
    found = summary([Request(10.0, 8, 3, [])] * 3, [quick, slow, unanswered])
    assert found["seen"]["ttft_ms"] == [40.0, 490.0, None] and found["seen"]["tpot_ms"][:2] == [10.0, 100.0]
    assert share_within(found["seen"], 100.0, 20.0) == share_within(found["seen"], 1000.0, 20.0) == 1 / 3
    assert share_within(found["seen"], 1000.0, 100.0) == 2 / 3
    assert found["tokens"] == 7 and found["itl_max_ms"] == 100.0


def test_the_steady_rate_is_that_between_the_ends_of_prompts():
    sys.path.insert(0, str(BENCHMARKS))
    from cell import steady_rate

    assert steady_rate([0.5, 0.9, 1.3], 4000, 1.0) == pytest.approx(10_000)
    assert steady_rate([0.5], 4000, 7.0) == steady_rate([], 4000, 7.0) == steady_rate([0.5, 0.5], 4000, 7.0) == 7.0


def test_the_comparison_reads_stock_at_the_same_itl():
    sys.path.insert(0, str(BENCHMARKS))
    from compare import at

    curve = [(20.0, 100.0), (10.0, 40.0), (12.0, 30.0)]  # the chunk at 12 ms is worse than the one at 10
    assert at(9.9, curve) is None
    assert at(10.0, curve) == 40 and at(15.0, curve) == 70 and at(20.0, curve) == 100 and at(99.0, curve) == 100


def test_the_comparison_reads_every_committed_frontier():
    files = sorted((BENCHMARKS / "results").glob("frontier-*.json"))
    run = subprocess.run(
        [sys.executable, "compare.py", *files], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=True
    )
    rows = {
        tuple(line.split(" | ")[:2]) for line in run.stdout.splitlines() if "capped:" in line or "disjoint:" in line
    }
    assert len(files) == 6 and len(rows) == 24


def test_the_picture_in_the_readme_is_that_of_the_committed_frontiers(tmp_path):
    files = sorted((BENCHMARKS / "results").glob("frontier-*.json"))
    pictures = [tmp_path / "one.svg", tmp_path / "again.svg"]
    for picture in pictures:
        command = [sys.executable, "plot.py", *files, "--out", picture]
        subprocess.run(command, cwd=BENCHMARKS, capture_output=True, timeout=120, check=True)
    made, again = (picture.read_text() for picture in pictures)
    assert made == again
    committed = (BENCHMARKS.parent / "docs" / "frontier-h200.svg").read_text()
    texts = [re.findall("<text[^>]*>([^<]+)</text>", picture) for picture in (made, committed)]
    assert texts[0] == texts[1] and "stock, by chunk" in texts[0] and texts[0].count("disjoint, by SMs of prefill") == 1
    assert "docs/frontier-h200.svg" in (BENCHMARKS.parent / "README.md").read_text()


def test_the_profile_is_made_of_the_committed_frontiers():
    files = sorted((BENCHMARKS / "results").glob("frontier-*.json"))
    run = subprocess.run(
        [sys.executable, "device_profile.py", *files],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    made = json.loads(run.stdout)
    committed = json.loads((BENCHMARKS / "results" / "profile-h200-llama-8b.json").read_text())
    for name in ("decode_fixed_ms", "prefill_ms_per_token", "prefill_ms_per_token_pair", "fused_prompt", "kv_tokens"):
        assert made[name] == pytest.approx(committed[name])
    assert made["groups"] == committed["groups"] and len(made["groups"]) == 6
    assert made["errors"] == committed["errors"]


def test_the_committed_prediction_is_what_the_simulator_says():
    sys.path.insert(0, str(BENCHMARKS))
    from predict import VALUES, measured

    results = BENCHMARKS / "results"
    served = json.loads((results / "replay-h200.json").read_text())["rows"]
    prediction = json.loads((results / "prediction-h200.json").read_text())
    arms = {(row["trace"], row["setting"]) for row in served if not str(row["setting"]).startswith("slo")}
    assert {(row["trace"], row["setting"]) for row in prediction["rows"]} == arms and len(arms) == 7
    for row in prediction["rows"]:
        rounds = [measured(one) for one in served if (one["trace"], one["setting"]) == (row["trace"], row["setting"])]
        for value in VALUES:
            assert min(one[value] for one in rounds) <= row["measured"][value] <= max(one[value] for one in rounds)
    for value in VALUES:
        off = sorted(abs(row["predicted_over_measured"][value] - 1) for row in prediction["rows"])
        assert prediction["errors"][value]["max"] == off[-1]


def test_the_error_of_the_committed_calibration_is_what_the_readme_says():
    results = BENCHMARKS / "results"
    files = [results / "calibration-h200.json", *sorted(results.glob("frontier-h200-again-*.json"))]
    run = subprocess.run(
        [sys.executable, "calibration_error.py", *files], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60
    )
    found = json.loads(run.stdout)
    assert found["decode beside prefill"]["points"] == found["prefill beside decode"]["points"] == 24
    assert found["decode beside prefill"]["median"] < 0.025 and found["decode beside prefill"]["p95"] < 0.115
    assert found["decode alone"]["max"] < 0.055 and found["prefill alone"]["max"] < 0.075
    assert found["prefill beside decode"]["median"] < 0.055 and found["prefill beside decode"]["p95"] < 0.12


def test_results_that_are_committed_say_where_they_come_from():
    files = sorted((BENCHMARKS / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert result["machine"] and result["versions"] and result["command"], file.name
