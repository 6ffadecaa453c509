# SPDX-License-Identifier: Apache-2.0
"""Whether a matrix product of a size not used before keeps the host waiting for what runs on another stream.

cuBLAS chooses a kernel by the number of tokens. Each size is launched twice beside a kernel that only takes time, after
a few sizes (USED_TOKENS) were launched alone. How long the launch took is written, and whether the other kernel had
ended by then. Down projection of Llama-3.1-8B in bf16. Needs an NVIDIA GPU.

    python benchmarks/first_use.py --tokens 256,705,900,904 --out first-use.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import description

INTERMEDIATE, HIDDEN = 14336, 4096
USED_TOKENS = (16, 256, 1024)
SPIN_CYCLES = 1_500_000_000  # about 0.8 s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="256,704,705,706,900,904")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, and PyTorch sees none")
    found = description() | {"rows": measure([int(tokens) for tokens in args.tokens.split(",")])}
    text = json.dumps(found, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


def measure(sizes: list[int]) -> list[dict[str, Any]]:
    """The first and the second launch of each size; all memory is there before."""
    weight = torch.randn(HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16).t()
    inputs = {n: torch.randn(n, INTERMEDIATE, device="cuda", dtype=torch.bfloat16) for n in (*USED_TOKENS, *sizes)}
    outputs = {n: torch.empty(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in inputs}
    for tokens in USED_TOKENS:
        torch.mm(inputs[tokens], weight, out=outputs[tokens])
    other = torch.cuda.Stream()
    rows = []
    for tokens in sizes:
        for launch in ("first", "second"):
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                torch.cuda._sleep(SPIN_CYCLES)
                end = other.record_event()
            begun_s = time.perf_counter()
            torch.mm(inputs[tokens], weight, out=outputs[tokens])
            launch_ms = (time.perf_counter() - begun_s) * 1e3
            rows.append(
                {"tokens": tokens, "launch": launch, "launch_ms": launch_ms, "waited_for_the_other": end.query()}
            )
    return rows


if __name__ == "__main__":
    main()
