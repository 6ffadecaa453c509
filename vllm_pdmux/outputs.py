# SPDX-License-Identifier: Apache-2.0
"""Two updates of one engine step become one set of outputs for the clients."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request


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


def outputs_of_ended(requests: Iterable[Request]) -> dict[int, EngineCoreOutputs]:
    """What tells the clients that `requests` ended without another token, by client index."""
    outputs: dict[int, EngineCoreOutputs] = {}
    for request in requests:
        outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
    return outputs
