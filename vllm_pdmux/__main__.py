# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pdmux`: the command line."""

import sys

from vllm_pdmux.cli import main

if __name__ == "__main__":
    sys.exit(main())
