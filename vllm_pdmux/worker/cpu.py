# SPDX-License-Identifier: Apache-2.0
"""The worker class of the CPU build."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_pdmux.worker.worker import PDMuxWorkerMixin


class PDMuxCPUWorker(PDMuxWorkerMixin, CPUWorker):
    """vLLM's CPU worker with a prefill lane."""
