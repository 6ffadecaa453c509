# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, at a size that says nothing of speed, so that they do not rot."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_results_that_are_committed_say_where_they_come_from():
    files = sorted((BENCHMARKS / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert result["machine"] and result["versions"] and result["command"], file.name
