# SPDX-License-Identifier: Apache-2.0
"""The space of the GPU: how its SMs are divided between the two lanes."""

from vllm_pdmux.spatial.granted import BACKENDS, GrantedGroup, granted_groups, open_backend
from vllm_pdmux.spatial.groups import (
    CAPPED,
    DISJOINT,
    Group,
    SplitError,
    SplitSettings,
    automatic_split,
    stream_groups,
)
from vllm_pdmux.spatial.partition import Partition, PartitionError, Partitions, SMLimits

__all__ = [
    "BACKENDS",
    "CAPPED",
    "DISJOINT",
    "GrantedGroup",
    "Group",
    "Partition",
    "PartitionError",
    "Partitions",
    "SMLimits",
    "SplitError",
    "SplitSettings",
    "automatic_split",
    "granted_groups",
    "open_backend",
    "stream_groups",
]
