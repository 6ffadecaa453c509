# SPDX-License-Identifier: Apache-2.0
"""vLLM in processes of its own: what an engine's configuration becomes, and what is said about it.

Imported by the tests, this module starts such processes; run as a program, it is what they run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORKER = "vllm_pdmux.worker.cpu.PDMuxCPUWorker"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
SCHEDULER = "vllm_pdmux.scheduler.Scheduler"
STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

ENGINE_ARGS = {"max_model_len": 2048, "enforce_eager": True}
HIDE_PLUGIN, SHARED, FRESH = "hide-plugin", "shared", "fresh"  # kinds of the process that imports vLLM
HANG_LIMIT_S = 300  # no test waits longer for a process; none expects to be fast


@dataclass
class Resolved:
    """An engine's configuration after vLLM and its plugins have had their say, or the error that it ended in."""

    error: str = ""  # type and text of what creating it raised
    log: str = ""  # stdout and stderr, without times, process ids and addresses
    worker: str = ""
    scheduler: str = ""  # the class that vLLM would instantiate
    platform: str = ""
    settings: dict[str, str] = field(default_factory=dict)  # every one that was resolved, by its path
    environ: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)  # of vLLM and of ours, as the configuration was made
    checked_again: list[list[str]] = field(default_factory=list)  # (worker, named scheduler) of config, config, a copy

    def log_lines(self, text: str) -> list[str]:
        return [line for line in self.log.splitlines() if text in line]


# --- the tests' side --------------------------------------------------------------------------------------------------


@functools.cache
def model() -> str:
    from vllm_pdmux.demo_model import ensure_model

    return str(ensure_model())


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with nothing in it that asks for the plugin or leaves it out, and `extra`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PDMUX", "VLLM_"))}
    return inherited | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | extra


def resolve(engine_args: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Resolved:
    """What vLLM makes of these engine arguments. The process is a fork of one that has imported vLLM already."""
    return _ask(_importer(), engine_args, environ)


def resolve_afresh(
    engine_args: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, *, hide_plugin: bool = False
) -> Resolved:
    """The same in a new interpreter, with what the import of vLLM prints; `hide_plugin`: ours is not installed."""
    with tempfile.TemporaryFile("w+") as output:
        with _start_importer(HIDE_PLUGIN if hide_plugin else FRESH, output, environ) as process:
            resolved = _ask(process, engine_args, None)
            process.stdin.close()
        output.seek(0)
        resolved.log = _normalised(output.read()) + resolved.log
    return resolved


def run_engine(prompt: str, engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> subprocess.CompletedProcess:
    """A real engine in one new process, which prints ANSWER and the text as JSON."""
    command = [sys.executable, __file__, "answer", prompt, json.dumps({"model": model()} | ENGINE_ARGS | engine_args)]
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.run(
        command,
        env=environment(**one_process, **environ),
        text=True,
        timeout=HANG_LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@functools.cache
def _importer() -> subprocess.Popen:
    return _start_importer(SHARED, subprocess.DEVNULL)


def _start_importer(kind: str, stderr: Any, environ: Mapping[str, str] | None = None) -> subprocess.Popen:
    """A process that imports vLLM and then answers requests until its stdin is closed."""
    command = [sys.executable, __file__, "resolve", kind]
    env = environment(**environ or {})
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)


def _ask(
    process: subprocess.Popen, engine_args: Mapping[str, Any] | None, environ: Mapping[str, str] | None
) -> Resolved:
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "engine_args": {"model": model()} | ENGINE_ARGS | dict(engine_args or {}),
            "environ": dict(environ or {}),
            "folder": folder,
        }
        print(json.dumps(request), file=process.stdin, flush=True)
        reply = process.stdout.readline()
        assert reply, f"the process that imports vLLM is gone, exit status {process.wait(HANG_LIMIT_S)}"
        log, answer = _normalised(Path(folder, "log").read_text()), Path(folder, "answer.json")
        assert answer.is_file(), f"no answer, wait status {reply.strip()}:\n{log}"
        return Resolved(**json.loads(answer.read_text()) | {"log": log})


def _normalised(log: str) -> str:
    log = re.sub(r"\x1b\[[0-9;]*m", "", log)
    log = re.sub(r"pid=\d+", "pid=N", log)
    log = re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", "TIME", log)
    return re.sub(r"0x[0-9a-f]+", "0xN", log)


# --- in the process ---------------------------------------------------------------------------------------------------


def _serve_requests() -> None:
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401 - the import that all forks share

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _answer_and_exit(request)
        print(os.waitpid(pid, 0)[1], flush=True)


def _answer_and_exit(request: Mapping[str, Any]) -> None:
    folder = Path(request["folder"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environ"])
    answer = _resolved(request["engine_args"])
    (folder / "answer.json").write_text(json.dumps(asdict(answer)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _resolved(engine_args: Mapping[str, Any]) -> Resolved:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    try:
        config = EngineArgs(**engine_args).create_engine_config()
    except BaseException as error:  # noqa: BLE001 - SystemExit is an answer too
        return Resolved(error=f"{type(error).__name__}: {error}")
    resolved = Resolved(
        worker=config.parallel_config.worker_cls,
        platform=_qualified(type(current_platform)),
        settings=dict(_flattened(config, "config", ())) | {"config.instance_id": "(random)"},
        environ=dict(os.environ),
        modules=sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_pdmux")),
    )
    resolved.checked_again = [_checked(config), _checked(config), _checked(_deep_copy(config))]
    resolved.scheduler = _qualified(config.scheduler_config.get_scheduler_cls())
    return resolved


def _checked(config: Any) -> list[str]:
    """Worker and scheduler after the plugins were loaded, and the configuration checked, once more."""
    from vllm import platforms, plugins

    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    platforms.current_platform.check_and_update_config(config)
    return [config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls]


def _deep_copy(config: Any) -> Any:
    import copy

    return copy.deepcopy(config)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _flattened(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """(path, text) of everything in `value`, private attributes included."""
    if id(value) in above:
        yield path, "(a value above)"
        return
    above = (*above, id(value))
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _flattened(value[key], f"{path}[{key!r}]", above)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _flattened(item, f"{path}[{index}]", above)
    elif type(value).__module__.startswith(("vllm.config", "transformers.")) and hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            yield from _flattened(vars(value)[name], f"{path}.{name}", above)
    else:
        text = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)
        yield path, f"{_qualified(type(value))} {re.sub(r'0x[0-9a-f]+', '0xN', str(text))}"


def _hide_plugin() -> None:
    """As if this project were not installed: its distribution, so its entry points too, are not found."""
    from importlib import metadata

    found = metadata.distributions

    def distributions(**parameters: Any) -> Iterator[metadata.Distribution]:
        return (each for each in found(**parameters) if each.metadata["Name"] != "vllm-pdmux")

    metadata.distributions = distributions


def _read_internals_once() -> None:
    """The start-up check of vLLM's source takes a second; its result is the same in every fork."""
    from vllm_pdmux import internals

    internals.missing_from_installed()


def _answer_prompt(prompt: str, engine_args: Mapping[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    output = LLM(**engine_args).generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print("\nANSWER", json.dumps(output[0].outputs[0].text), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        _answer_prompt(sys.argv[2], json.loads(sys.argv[3]))
    else:
        if sys.argv[2] == HIDE_PLUGIN:
            _hide_plugin()
        if sys.argv[2] == SHARED:
            _read_internals_once()
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
            _serve_requests()
