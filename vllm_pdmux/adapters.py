# SPDX-License-Identifier: Apache-2.0
"""Which requests find a slot for their adapter of LoRA. Adapter 0 is none, and needs no slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vllm.v1.request import Request


def adapter_of(request: Request) -> int:
    """The adapter of a request."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def fitting_adapters(held: Iterable[int], waiting: Iterable[Request], slots: int) -> set[int]:
    """Adapters of requests that may run: those `held`, and those of the first that wait while there are free slots."""
    fitting = {0, *held}
    for request in waiting:
        if len(fitting) <= slots:  # one of them is none
            fitting.add(adapter_of(request))
    return fitting


def in_their_places(queue: Iterable[Request], left: Collection[Request], fitting: Collection[int]) -> list[Request]:
    """`queue` without those with a `fitting` adapter that are not `left` any more; in front, those that have come."""
    before, still = list(queue), set(left)
    waits = [request for request in before if request in still or adapter_of(request) not in fitting]
    return [*(request for request in left if request not in set(before)), *waits]
