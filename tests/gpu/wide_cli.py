# SPDX-License-Identifier: Apache-2.0
"""The command `vllm` whose made-up weights are wide (wide_weights.py), in the processes that it starts as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import wide_weights

wide_weights.install()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
