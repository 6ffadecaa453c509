# SPDX-License-Identifier: Apache-2.0
"""The communicators of the prefill lane, where a model's layers are spread over several ranks.

The two lanes of a rank use the device at once, and two collectives of one communicator may not: the ranks would take
the one's data for the other's. So the lane has a communicator of its own for each group of ranks, made as vLLM makes
them, and it is in place while the lane runs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_pdmux.support import UnsupportedError

# No forward pass uses these: they are for starting and for what is agreed between steps.
_NOT_IN_A_FORWARD = ("_WORLD", "_INNER_DP_WORLD")
# What a group communicates through. The group's name, ranks and sizes are the same in both lanes.
_CONTENTS = ("device_communicator", "device_group", "cpu_group", "mq_broadcaster")
# Models and layers with collectives in their own kernels, whose buffers are kept once for the whole process.
_OWN_COLLECTIVES = ("vllm.models.", "vllm.model_executor.layers.minimax_rms_norm")


class LaneCommunicators:
    """Of one rank. Making them is a collective: every rank does it, at the same point of its start.

    What is exchanged is not the group but what is in it. Groups are found in three ways: through vLLM's globals, by the
    name that is written in a compiled graph, and in layers that have kept the object. All three find the same object,
    so all three find the lane's communicators while these are in it. CUDA graphs keep those that they were captured
    with, the decode lane's.
    """

    def __init__(self) -> None:
        self._pairs = [(group, _made_like(group)) for group in groups_of_a_forward()]

    def swap(self) -> None:
        """Exchange what is in place with what is kept."""
        for group, own in self._pairs:
            for name in _CONTENTS:
                here, there = getattr(group, name), getattr(own, name)
                setattr(group, name, there)
                setattr(own, name, here)

    def check(self, model: torch.nn.Module) -> None:
        """Raise UnsupportedError where a layer of `model` would use the decode lane's communicators in the lane."""
        shared = {id(getattr(group, name)) for group, _ in self._pairs for name in _CONTENTS} - {id(None)}
        for name, module in model.named_modules():
            kept = [attribute for attribute, value in vars(module).items() if id(value) in shared]
            if kept:
                raise _unsupported(model, f"keeps a communicator in {name}.{kept[0]}")
            if type(module).__module__.startswith(_OWN_COLLECTIVES):
                raise _unsupported(model, f"has collectives of its own in {name or type(module).__name__}")

    def destroy(self) -> None:
        """Give them back. The lane does not run any more."""
        for _, own in self._pairs:
            own.destroy()
        self._pairs = []


def groups_of_a_forward() -> list[GroupCoordinator]:
    """vLLM's groups of more than one rank, in the same order on every rank. One may go by several names."""
    found: dict[int, GroupCoordinator] = {}
    for name, group in vars(parallel_state).items():
        if isinstance(group, GroupCoordinator) and group.world_size > 1 and name not in _NOT_IN_A_FORWARD:
            found[id(group)] = group
    return list(found.values())


def _made_like(group: GroupCoordinator) -> Any:
    """Another one of the same ranks. Its kind is in its name, which decides what it may communicate through."""
    return parallel_state.init_model_parallel_group(
        group.group_ranks,
        group.local_rank,
        group.torch_distributed_backend,
        use_message_queue_broadcaster=group.mq_broadcaster is not None,
        group_name=group.unique_name.split(":")[0],
        use_device_communicator=group.use_device_communicator,
    )


def _unsupported(model: torch.nn.Module, what: str) -> UnsupportedError:
    return UnsupportedError(
        [
            f"{type(model).__name__} {what}, which both lanes would use at once: set --tensor-parallel-size 1, or "
            "serve this model without the plugin"
        ]
    )
