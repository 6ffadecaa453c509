# SPDX-License-Identifier: Apache-2.0
"""What is global in a process belongs to one lane at a time."""

import sys
from types import ModuleType

import vllm.forward_context as forward_context

from vllm_pdmux.worker import process_state
from vllm_pdmux.worker.process_state import ProcessState


def test_each_lane_finds_its_own_forward_context_and_scratch(monkeypatch):
    module = ModuleType("scratch_of_a_kernel")
    module.buffers = {"decode": 1}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        process_state, "SCRATCH", ((module.__name__, "buffers"), (module.__name__, "no_such"), ("no.such", "x"))
    )
    monkeypatch.setattr(forward_context, "_forward_context", "decode's")
    state = ProcessState()
    state.swap()
    assert forward_context._forward_context is None and module.buffers == {}
    forward_context._forward_context, module.buffers["prefill"] = "prefill's", 2
    state.swap()
    assert forward_context._forward_context == "decode's" and module.buffers == {"decode": 1}
    state.swap()
    assert forward_context._forward_context == "prefill's" and module.buffers == {"prefill": 2}


def test_scratch_of_a_module_that_is_loaded_later_is_exchanged_from_then_on(monkeypatch):
    monkeypatch.setattr(process_state, "SCRATCH", (("loaded_later", "buffers"),))
    state = ProcessState()
    state.swap()  # the prefill lane runs
    module = ModuleType("loaded_later")
    module.buffers = {"prefill": 1}
    monkeypatch.setitem(sys.modules, "loaded_later", module)
    state.swap()
    assert module.buffers == {}
    state.swap()
    assert module.buffers == {"prefill": 1}
