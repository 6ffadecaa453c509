# SPDX-License-Identifier: Apache-2.0
"""What a consumer of vLLM's KV events, a router for one, may believe of a batch in the lane.

vLLM notes that a block is stored when it is allocated, and publishes that when the step has run. A batch in the lane
lasts for many steps: what it stores is announced when it has ended, and never if it is dropped. What it has evicted to
have room is gone at once, and that is announced at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@contextmanager
def stored_set_aside(pool: BlockPool) -> Iterator[list[KVCacheEvent]]:
    """The list gets what is noted as stored meanwhile, which is not in the queue of events afterwards."""
    stored: list[KVCacheEvent] = []
    before, pool.kv_event_queue = pool.kv_event_queue, []
    try:
        yield stored
    finally:
        noted, pool.kv_event_queue = pool.kv_event_queue, before
        for event in noted:
            (stored if isinstance(event, BlockStored) else pool.kv_event_queue).append(event)


@contextmanager
def not_announced(pool: BlockPool) -> Iterator[None]:
    """Nothing that is noted meanwhile is published."""
    before, pool.kv_event_queue = pool.kv_event_queue, []
    try:
        yield
    finally:
        pool.kv_event_queue = before


def blocks_to_compute(output: SchedulerOutput, requests: dict[str, Request], manager: KVCacheManager) -> set[int]:
    """The ids of the blocks that the step `output` writes to. `requests`: those that it has scheduled, by id."""
    ids: set[int] = set()
    for req_id, num_tokens in output.num_scheduled_tokens.items():
        computed = requests[req_id].num_computed_tokens - num_tokens
        for group, blocks in zip(manager.kv_cache_config.kv_cache_groups, manager.get_block_ids(req_id), strict=True):
            ids.update(blocks[computed // group.kv_cache_spec.block_size :])
    return ids
