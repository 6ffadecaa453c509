# SPDX-License-Identifier: Apache-2.0
"""The two engines, one after the other: each has the device's memory to itself, and what it took is free afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_pdmux.verify import VerifyError
from vllm_pdmux.verify.answers import Answer

_MODULE = "vllm_pdmux.verify.engine_process"
_STDERR = 2
_STALLED = 70  # EXIT_STALLED of worker.watchdog, which only a process that serves imports


@dataclass(frozen=True)
class Served:
    """What one engine has done, and the error that it ended with while it served, in one line, if it did."""

    answers: Mapping[str, Mapping[str, Answer]]  # by schedule and request
    rounds: tuple[Mapping[str, Any], ...]  # of each: ttft_ms of the long prompt, itl_ms, itl_during_prefill_ms
    facts: Mapping[str, Any]
    prompt_tokens: Mapping[str, int]  # by request
    kinds: Mapping[str, str]  # by request
    beside_steps: Mapping[str, int]  # by schedule: decode steps with prefill layers beside them; empty for stock
    error: str | None = None


def serve(spec: Mapping[str, Any], with_pdmux: bool, show_output: bool = False) -> Served:
    """Start the engine in a process and wait for its end; it says on standard error how far it is. `show_output`: all
    that it prints goes there too.

    Raises VerifyError when the engine does not start. One that ends with an error later has it in `error`.
    """
    which = "the engine with the plugin" if with_pdmux else "the stock engine"
    with tempfile.TemporaryDirectory(prefix="vllm-pdmux-verify-") as folder:
        spec_path, out_path, log_path = (Path(folder, name) for name in ("spec.json", "out.json", "log"))
        spec_path.write_text(json.dumps({**spec, "with_pdmux": with_pdmux}), encoding="utf-8")
        # Progress has a file of its own: what vLLM and its libraries print goes elsewhere.
        with log_path.open("w", encoding="utf-8") as log, os.fdopen(os.dup(_STDERR), "wb") as progress:
            fd = progress.fileno()
            command = [sys.executable, "-m", _MODULE, str(spec_path), str(out_path), str(fd)]
            output = sys.stderr if show_output else log
            run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(fd,))
        found: dict[str, Any] = {"started": False}
        if out_path.exists():
            found = json.loads(out_path.read_text(encoding="utf-8"))
        if run.returncode != 0 and "error" not in found:
            found["error"] = _died(run.returncode, log_path, with_pdmux)
    if not found["started"]:
        reason: str = found["error"]  # what vLLM refuses names the engine already
        raise VerifyError(reason if reason.startswith("vLLM (") else f"{which} does not start: {reason}")
    return _served(found)


def _served(found: dict[str, Any]) -> Served:
    given = {
        schedule: {name: Answer.from_plain(plain) for name, plain in rows.items()}
        for schedule, rows in found.get("answers", {}).items()
    }
    rest = {name: found.get(name, {}) for name in ("facts", "prompt_tokens", "kinds", "beside_steps")}
    return Served(given, tuple(found.get("rounds", ())), error=found.get("error"), **rest)


def _died(code: int, log_path: Path, with_pdmux: bool) -> str:
    if with_pdmux and code == _STALLED:
        return (
            f"its process ended with exit status {code}, as the watchdog ends it: the prefill lane made no progress "
            "for watchdog_s seconds: --debug shows all stacks; if the machine is only slow, raise watchdog_s"
        )
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    lines = [line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "nothing was printed")
    return f"its process ended with {how} ({last}): --debug shows all that it printed"
