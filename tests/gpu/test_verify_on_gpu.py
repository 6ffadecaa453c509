# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux verify` on a GPU, in 16 bits: both engines in processes of their own, one after the other."""

import json
import os
import subprocess
import sys

from divisions import BOTH_KINDS, split
from engine_models import wide_model

LIMIT_S = 300  # prevents a hang, no more


def test_tokens_are_stocks_by_the_rule_for_16_bits(gpu, tmp_path, record_property):
    config = tmp_path / "pdmux.json"
    config.write_text(json.dumps(split(gpu.multi_processor_count, BOTH_KINDS)))
    engine = ["--max-model-len", "2048", "--max-num-seqs", "16"]
    memory = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)]  # others may run beside it
    command = [sys.executable, "-m", "vllm_pdmux", "verify", "--json", "--model", wide_model(tmp_path / "model")]
    command += ["--config", str(config), *engine, *memory]
    environ = {name: value for name, value in os.environ.items() if name not in ("PDMUX", "PDMUX_CONFIG")}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["tokens_equal"] and found["dtype"] == "bfloat16" and "16 bits" in found["rule"]
    assert found["tokens"]["compared"] > found["tokens"]["total"] / 2
    assert all(steps > 0 for steps in found["beside_steps"].values())
    record_property("verify", {name: found[name] for name in ("rule", "tokens", "beside_steps", "stock", "pdmux")})
