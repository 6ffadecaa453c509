# SPDX-License-Identifier: Apache-2.0
"""N-gram speculation beside a prompt in the lane (ngram_cases.py).

In a process of its own: it loads numba, after which vLLM's CPU build 0.32 can start no other engine in the process.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_all_cases_in_a_process_of_their_own():
    cases = Path(__file__).with_name("ngram_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", str(cases)]
    # Its threads would spin, and gain nothing with so little to look up.
    environ = os.environ | {"NUMBA_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
