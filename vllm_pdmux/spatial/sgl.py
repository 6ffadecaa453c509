# SPDX-License-Identifier: Apache-2.0
"""SM partitions through ``sgl_kernel.spatial``. Imported only when the backend `sgl_kernel` is chosen."""

from __future__ import annotations

from typing import Any

from vllm_pdmux.spatial.cuda import CudaPartitions
from vllm_pdmux.spatial.partition import PartitionError


class SglKernelPartitions(CudaPartitions):
    """Lets sgl_kernel make the streams; what they were granted is asked of the driver, as with the backend `cuda`."""

    def __init__(self, device: int):
        super().__init__(device)
        self._index = device
        try:
            from sgl_kernel import spatial
        except Exception as error:  # a library built for another torch fails in many ways
            raise PartitionError(_unusable(error)) from error
        self._spatial: Any = spatial

    def _streams(self, decode_sms: int) -> tuple[int, int]:
        step_sms = self.limits.step_sms
        # Rounded here as the driver does it, so that both sets together are the device.
        decode_sms = -(-decode_sms // step_sms) * step_sms
        prefill_sms = self.limits.total_sms - decode_sms
        try:
            streams = self._spatial.create_greenctx_stream_by_value(decode_sms, prefill_sms, self._index)
        except ImportError as error:
            raise PartitionError(_unusable(error)) from error
        except RuntimeError as error:
            raise PartitionError(
                f"sgl_kernel cannot split the device into {decode_sms} and {prefill_sms} SMs ({_first_line(error)}): "
                "choose another split, or backend cuda"
            ) from error
        self._kept.append(streams)
        return streams[0].cuda_stream, streams[1].cuda_stream


def _unusable(error: Exception) -> str:
    import torch

    return (
        f"backend sgl_kernel needs the package sglang-kernel, built for torch {torch.__version__}, but it does not "
        f"load ({type(error).__name__}: {_first_line(error)}): install a version for this torch, or use backend cuda"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
