# SPDX-License-Identifier: Apache-2.0
"""A request changes lanes: its state moves from one V1 runner to the other; the KV blocks stay where they are.

The state object itself moves, not a copy made from the scheduler's data: it holds the tokens sampled so far, the
position of a seeded generator and half-finished prompt logprobs, and stock vLLM carries all of these on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def move(req_ids: Iterable[str], source: Any, target: Any) -> None:
    """Move the state of those of `req_ids` that `source` knows to `target`. Others are new to both."""
    for req_id in req_ids:
        state = source.requests.pop(req_id, None)
        if state is None:
            continue
        assert req_id not in target.requests, f"request {req_id} is known to both lanes"
        target.requests[req_id] = state
        # A row that stays behind would be taken for the request's current state should it come back.
        source.input_batch.remove_request(req_id)
        num_prompt_logprobs = source.num_prompt_logprobs.pop(req_id, None)
        if num_prompt_logprobs is not None:
            target.num_prompt_logprobs[req_id] = num_prompt_logprobs


def forget(req_ids: Iterable[str], runner: Any) -> None:
    """Remove what `runner` holds of finished requests. Its batch must not be in progress."""
    for req_id in req_ids:
        if runner.requests.pop(req_id, None) is not None:
            runner.input_batch.remove_request(req_id)
            runner.num_prompt_logprobs.pop(req_id, None)
