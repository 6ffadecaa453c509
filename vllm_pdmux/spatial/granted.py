# SPDX-License-Identifier: Apache-2.0
"""From the groups that are asked for to the partitions that a device gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pdmux.spatial.groups import DISJOINT, Group
from vllm_pdmux.spatial.partition import Partition, PartitionError, Partitions

BACKENDS = ("cuda", "sgl_kernel", "streams")


@dataclass(frozen=True)
class GrantedGroup:
    """A mixed group and its partition. Groups that come to the same split share one partition and its streams."""

    asked: Group
    partition: Partition

    @property
    def index(self) -> int:
        return self.asked.index

    @property
    def is_disjoint(self) -> bool:
        """Whether decode is confined to the partition's decode set; else it has the whole device."""
        return self.asked.sharing == DISJOINT

    def describe(self, total_sms: int) -> str:
        """One line: what each lane has, and what was asked for where the driver granted something else."""
        prefill_sms = self.partition.prefill_sms
        decode_sms = self.partition.decode_sms if self.is_disjoint else total_sms
        line = f"group {self.index} ({self.asked.sharing}): prefill on {prefill_sms} SMs, decode on {decode_sms}"
        if (prefill_sms, self.partition.decode_sms) == (self.asked.prefill_sms, self.asked.decode_sms):
            return line
        return f"{line}; asked for: {self.asked.prefill_sms} and {self.asked.decode_sms}"


def open_backend(name: str, device: int) -> Partitions:
    """The backend of the setting `backend`, one of BACKENDS, on CUDA device `device`. Raises PartitionError."""
    if name == "sgl_kernel":
        from vllm_pdmux.spatial.sgl import SglKernelPartitions

        return SglKernelPartitions(device)
    if name == "streams":
        from vllm_pdmux.spatial.plain import PlainStreams

        return PlainStreams(device)
    from vllm_pdmux.spatial.cuda import CudaPartitions

    return CudaPartitions(device)


def granted_groups(groups: Sequence[Group], backend: Partitions) -> tuple[GrantedGroup, ...]:
    """The partitions of the mixed ones of `groups`, in order. PartitionError names every group that has none."""
    made: dict[int, Partition] = {}
    granted, problems = [], []
    for group in groups:
        if not (group.prefill_sms and group.decode_sms):
            continue  # a lane alone has the whole device
        try:
            if group.decode_sms not in made:
                partition = backend.partition(group.decode_sms)
                # Rounded up to a split that another group has already: one partition serves both.
                made[group.decode_sms] = next((old for old in made.values() if _same_split(old, partition)), partition)
            granted.append(GrantedGroup(group, made[group.decode_sms]))
        except PartitionError as error:
            problems.append(f"group {group.index}: {error}")
    if problems:
        raise PartitionError("; ".join(problems))
    return tuple(granted)


def _same_split(one: Partition, other: Partition) -> bool:
    return (one.decode_sms, one.prefill_sms) == (other.decode_sms, other.prefill_sms)
