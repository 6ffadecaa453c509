# SPDX-License-Identifier: Apache-2.0
"""Online: stream an answer from a server, and say when its first token came and how far apart the others were.

    python docs/examples/openai_client.py http://localhost:8000/v1 "Why is the sky blue?"

Needs the package openai. The server is any vLLM server; the client does not know whether the plugin is active.
"""

import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from openai import OpenAI


def stream(address: str, prompt: str, **request: Any) -> tuple[str, list[float]]:
    """The answer, and the seconds from the request to each of its pieces; `request`: more fields of the request."""
    client = OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    started_s = time.perf_counter()
    pieces, arrived_s = [], []
    messages = [{"role": "user", "content": prompt}]
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **request):
        if text := chunk.choices[0].delta.content:
            pieces.append(text)
            arrived_s.append(time.perf_counter() - started_s)
    return "".join(pieces), arrived_s


def describe(arrived_s: list[float]) -> str:
    """TTFT, and the median and the longest gap between two pieces."""
    gaps_ms = [(later - earlier) * 1e3 for earlier, later in pairwise(arrived_s)]
    if not arrived_s:
        return "the answer is empty"
    line = f"TTFT {arrived_s[0] * 1e3:.0f} ms"
    if gaps_ms:
        line += f", ITL median {statistics.median(gaps_ms):.1f} ms, longest {max(gaps_ms):.1f} ms"
    return line


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("give the address of a server, such as http://localhost:8000/v1, and a question")
    text, times_s = stream(sys.argv[1], sys.argv[2], max_tokens=64)
    print(text)
    print(describe(times_s))
