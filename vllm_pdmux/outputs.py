# SPDX-License-Identifier: Apache-2.0
"""Two updates of one engine step become one set of outputs for the clients."""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutputs


def merge_outputs(
    outputs: dict[int, EngineCoreOutputs], others: dict[int, EngineCoreOutputs]
) -> dict[int, EngineCoreOutputs]:
    """`outputs` with `others` in it, both by client index; statistics and time stamps are those of `outputs`."""
    for client_index, other in others.items():
        mine = outputs.setdefault(client_index, EngineCoreOutputs(outputs=[]))
        mine.outputs = [*other.outputs, *mine.outputs]
        if other.finished_requests:
            mine.finished_requests = (mine.finished_requests or set()) | other.finished_requests
    return outputs
