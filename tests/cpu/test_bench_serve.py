# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` against a server with the plugin: it runs to its end and no request fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from process_helpers import HANG_LIMIT_S, environment
from server_pair import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("logs_of_a_failure")]

PROMPTS, CLIENTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 4, 150, 8


def bench(server, folder, *arguments):
    """What the benchmark has saved."""
    command = [
        *(sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "bench", "serve"),
        *("--host", "127.0.0.1", "--port", str(server.port), "--model", server.model),
        *("--dataset-name", "random", "--num-prompts", str(PROMPTS), "--max-concurrency", str(CLIENTS)),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json", *arguments),
    ]
    done = subprocess.run(
        command, env=environment(), text=True, timeout=HANG_LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "result.json").read_text())


def test_no_request_fails(server_pair, tmp_path):
    joined = server_pair.counted("joins_total")
    result = bench(server_pair.pdmux, tmp_path)
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    assert result["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
    assert result["total_input_tokens"] >= PROMPTS * INPUT_TOKENS * 0.9  # text that is made of them has about as many
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0
    wait_until(lambda: server_pair.pdmux.num_running() == 0)
    assert server_pair.counted("joins_total") >= joined + PROMPTS // 2, "prompts came while nothing decoded"
