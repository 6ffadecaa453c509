# SPDX-License-Identifier: Apache-2.0
"""Which SMs does work on a stream really run on? A small kernel records each block's ``%smid``.

It proves what a partition claims: that the sets are disjoint and of the sizes that are reported, and that a CUDA graph
stays on the SMs of the stream it was captured on.
"""

from __future__ import annotations

from typing import Any

_SOURCE = b"""
extern "C" __global__ void census(int* seen, long long spin) {
    unsigned smid; asm volatile("mov.u32 %0, %%smid;" : "=r"(smid));
    long long start = clock64();
    while (clock64() - start < spin) {}
    if (threadIdx.x == 0) atomicAdd(seen + smid, 1);
}
"""
_MAX_SMS = 1024
_SPIN_CYCLES = 100_000  # long enough that blocks spread over every SM they may use


class Census:
    """Compiled once for the current device; needs cuda-bindings with NVRTC."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver, nvrtc

        self._torch, self._cu = torch, driver
        self._seen = torch.zeros(_MAX_SMS, dtype=torch.int32, device="cuda")  # makes the context that a module needs
        major, minor = torch.cuda.get_device_capability()
        error, program = nvrtc.nvrtcCreateProgram(_SOURCE, b"census.cu", 0, [], [])
        option = f"--gpu-architecture=sm_{major}{minor}".encode()
        (error,) = nvrtc.nvrtcCompileProgram(program, 1, [option])
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"the census kernel does not compile: {error}"
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = b" " * size
        nvrtc.nvrtcGetCUBIN(program, binary)
        error, module = driver.cuModuleLoadData(binary)
        assert error == driver.CUresult.CUDA_SUCCESS, f"the census kernel does not load: {error}"
        _, self._kernel = driver.cuModuleGetFunction(module, b"census")
        self._kept: Any = (binary, module)

    def sms(self, stream: Any) -> frozenset[int]:
        """The SMs that a launch on `stream` (a torch stream) reaches."""
        self._clear()
        self._launch(stream)
        return self._read()

    def sms_of_graph(self, capture_stream: Any, replay_stream: Any) -> frozenset[int]:
        """The SMs that a graph reaches which is captured on one stream and replayed on another."""
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture_stream):
            self._launch(capture_stream)
        self._clear()
        with torch.cuda.stream(replay_stream):
            graph.replay()
        return self._read()

    def _launch(self, stream: Any) -> None:
        import ctypes

        blocks = 8 * self._torch.cuda.get_device_properties(self._seen.device).multi_processor_count
        arguments = ((self._seen.data_ptr(), _SPIN_CYCLES), (ctypes.c_void_p, ctypes.c_longlong))
        (error,) = self._cu.cuLaunchKernel(self._kernel, blocks, 1, 1, 32, 1, 1, 0, stream.cuda_stream, arguments, 0)
        assert error == self._cu.CUresult.CUDA_SUCCESS, f"the census kernel does not launch: {error}"

    def _clear(self) -> None:
        self._torch.cuda.synchronize()
        self._seen.zero_()
        self._torch.cuda.synchronize()

    def _read(self) -> frozenset[int]:
        self._torch.cuda.synchronize()
        return frozenset(self._seen.nonzero().flatten().tolist())
