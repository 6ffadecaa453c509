# SPDX-License-Identifier: Apache-2.0
"""A real server with too little KV cache and 64 clients who ask for anything, change their minds and send nonsense.

PDMUX_ABUSE_S: for how many seconds (default: 40). Whatever they do, progress never stops, an answer that is whole is
the one that the same prompt has alone, memory, threads and file handles do not grow, and SIGTERM ends it.
"""

import json
import os

import pytest
from abuse import Abuse, abuse_until_sigterm
from server import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = float(os.environ.get("PDMUX_ABUSE_S", "40"))
LIMIT_TOKENS, BLOCKS = 512, 56  # of 32 tokens: three of the longest requests
ARGUMENTS = (
    *("--scheduler-cls", "vllm_pdmux.Scheduler"),
    *("--additional-config", json.dumps({"pdmux": {"layers_per_group": 2}})),
    *("--max-model-len", str(LIMIT_TOKENS), "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "256", "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)),
)


def text_is_the_same(tokens, expected, got):
    return "" if got.text == expected.text else "a wrong answer"


def test_whatever_clients_do(tmp_path, tiny_model_path):
    abuse = Abuse(SECONDS, LIMIT_TOKENS, range(3, 90), text_is_the_same)
    with serving(tmp_path / "log", tiny_model_path, ARGUMENTS) as server:
        print(abuse_until_sigterm(server, abuse, abuse.known(server)))
