# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux doctor` on a GPU, in processes of its own: a driver reads its environment when CUDA starts."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from divisions import BOTH_KINDS, DECODE_SMS, split

from vllm_pdmux.spatial.environment import LEAST_CONNECTIONS, MAX_CONNECTIONS

CONNECTIONS = (None, 1, 8, 32)
LIMIT_S = 120  # prevents a hang, no more


@pytest.fixture(scope="module")
def said(tmp_path_factory, gpu):
    """What the command prints, by a name for how it was called, after it has found nothing wrong."""
    config = tmp_path_factory.mktemp("doctor") / "pdmux.json"
    config.write_text(json.dumps(split(gpu.multi_processor_count, BOTH_KINDS)))
    divisions = ["--config", str(config)]
    calls = {connections: (["--json", *divisions], connections) for connections in CONNECTIONS}
    calls |= {"defaults": (["--json"], None), "table": (divisions, None)}
    with ThreadPoolExecutor() as pool:
        return dict(zip(calls, pool.map(lambda call: doctor(*call), calls.values()), strict=True))


def doctor(arguments, connections):
    environ = {name: value for name, value in os.environ.items() if name != MAX_CONNECTIONS and "PDMUX" not in name}
    # Wide enough that no line of the table is broken.
    environ |= {"COLUMNS": "250"} | ({} if connections is None else {MAX_CONNECTIONS: str(connections)})
    command = [sys.executable, "-m", "vllm_pdmux", "doctor", *arguments]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    return run.stdout if run.returncode == 0 else f"exit status {run.returncode}\n{run.stdout}{run.stderr}"


def findings(output):
    """The report, which is the last line: a library may print before it."""
    assert not output.startswith("exit status"), output
    report = json.loads(output.splitlines()[-1])
    assert report["healthy"]
    return report["findings"]


@pytest.mark.parametrize("connections", CONNECTIONS)
def test_lanes_are_disjoint_and_graphs_stay_with_any_number_of_queues(said, connections):
    """The census of a division is in order only if both hold; few queues are a warning, since they cost time alone."""
    found = findings(said[connections])
    census = [one for one in found if one["what"] == "census"]
    assert len(census) == len(BOTH_KINDS) and {one["status"] for one in census} == {"ok"}, census
    for kind in ("capped", "disjoint"):
        assert sum(f"({kind})" in one["detail"] for one in census) == len(DECODE_SMS)
    warnings = [one["detail"] for one in found if one["what"] == "beside it" and one["status"] == "warning"]
    warned = [text for text in warnings if text.startswith(f"{MAX_CONNECTIONS}={connections}: ")]
    assert len(warned) == (connections is not None and connections < LEAST_CONNECTIONS), warnings


def test_the_gpu_and_its_sms_are_described(said, gpu):
    found = {one["what"]: one for one in findings(said["defaults"])}
    assert gpu.name in found["GPU"]["detail"]
    assert found["SMs"]["detail"].startswith(f"{gpu.multi_processor_count}, in steps of ")
    assert found["vllm"]["status"] == found["torch"]["status"] == found["census"]["status"] == "ok"


def test_people_get_a_table_with_the_census(said, gpu):
    lines = said["table"].splitlines()
    for number, kind in enumerate(BOTH_KINDS, 1):
        (line,) = [line for line in lines if f"group {number} ({kind})" in line]
        assert "census" in line and "ok" in line
    assert any(gpu.name in line for line in lines)
