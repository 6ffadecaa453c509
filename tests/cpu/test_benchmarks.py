# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, at a size that says nothing of speed, so that they do not rot."""

import json
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
    settings = ["--chunks", "32,64", "--groups", "capped:100", "--rounds", "2"]
    command = [sys.executable, "frontier.py", *shape, *settings, "--out", str(out)]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    results = json.loads(out.read_text())
    order = [("stock", 32), ("pdmux", "capped:100"), ("stock", 64)]
    assert [(row["arm"], row["setting"]) for row in results["rows"]] == order * 2
    assert all(row["itl_alone_ms"] > 0 and row["prefill_tokens_per_s"] > 0 for row in results["rows"])
    assert all(arm["kv_tokens"] > 0 and arm["ready_s"] > 0 for arm in results["arms"].values())
    assert "frontier.py" in results["command"]


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
    rows = [line for line in run.stdout.splitlines() if "capped:" in line or "disjoint:" in line]
    assert len(files) == 3 and len(rows) == 24


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
    for name in ("decode_fixed_ms", "prefill_ms_per_token", "prefill_ms_per_token_pair", "fused_floor", "kv_tokens"):
        assert made[name] == pytest.approx(committed[name])
    for group, before in zip(made["groups"], committed["groups"], strict=True):
        assert before.items() <= {**group, "slowdown": before["slowdown"], "pace": before["pace"]}.items()
        assert (group["slowdown"], group["pace"]) == pytest.approx((before["slowdown"], before["pace"]))
    for kind in ("decode beside prefill", "prefill beside decode"):
        assert made["errors"][kind]["max"] < committed["errors"][kind]["max"]


def test_results_that_are_committed_say_where_they_come_from():
    files = sorted((BENCHMARKS / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert result["machine"] and result["versions"] and result["command"], file.name
