# SPDX-License-Identifier: Apache-2.0
"""Two plain streams with priorities and no partition: the baseline that a partition has to beat."""

from __future__ import annotations

from vllm_pdmux.spatial.partition import Partition, SMLimits


class PlainStreams:
    """Every partition is the same one: both lanes on the whole device, decode at a higher priority."""

    def __init__(self, device: int):
        import torch

        total_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.limits = SMLimits(total_sms, total_sms, total_sms)
        lowest, highest = torch.cuda.Stream.priority_range()
        self._kept = [torch.cuda.Stream(device, priority=priority) for priority in (highest, lowest)]

    def partition(self, decode_sms: int) -> Partition:
        """The whole device for both lanes, whatever is asked for."""
        decode, prefill = self._kept
        return Partition(self.limits.total_sms, self.limits.total_sms, decode.cuda_stream, prefill.cuda_stream)
