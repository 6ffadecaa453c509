# SPDX-License-Identifier: Apache-2.0
"""The runs side by side: the numbers, whether the texts are equal, and what failed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm_pdmux.demo.drive import Run
from vllm_pdmux.quantile import quantile


@dataclass(frozen=True)
class Summary:
    """Of some times in milliseconds. The p99 is the smallest of them that at least 99 % do not exceed."""

    median: float
    p99: float
    max: float


@dataclass(frozen=True)
class Facts:
    """What the demo ran."""

    model: str
    dtype: str
    vllm: str  # distribution and version
    device: str  # the platform's name of it
    cpus: int  # that the process may use
    layers: int  # of the model
    chats: int
    document_tokens: int  # of the whole prompt
    max_tokens: int
    chunk_tokens: int  # of a step of the stock engine that prefills in chunks


@dataclass(frozen=True)
class Comparison:
    """Stock vLLM with its default settings and with small chunks, and the plugin, on the same workload."""

    facts: Facts
    stock: Run
    chunked: Run
    pdmux: Run

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """In the order in which they are shown."""
        return self.stock, self.chunked, self.pdmux

    @property
    def equal(self) -> dict[str, bool]:
        """By request, whether the plugin's text is stock's."""
        return self.equal_of(self.pdmux)

    def equal_of(self, run: Run) -> dict[str, bool]:
        """By request, whether the text in `run` is that of stock vLLM with its default settings."""
        return {name: text == run.texts.get(name) for name, text in self.stock.texts.items()}

    @property
    def decode_steps(self) -> int:
        """Steps in which layers of the prefill ran beside decoding requests: as the scheduler's trace has it, since an
        engine that prefills all layers at once also gives the chats a token in that step."""
        return sum(step.decode_batch > 0 for step in self.pdmux.timeline)

    @property
    def layer_groups(self) -> int:
        """Steps of one pass through the model. A prompt longer than the engine's token budget takes several passes."""
        starts = [number for number, step in enumerate(self.pdmux.timeline) if step.first_layer == 0]
        return starts[1] if len(starts) > 1 else len(self.pdmux.timeline)

    @property
    def failure(self) -> str | None:
        """What failed, in one line; None: all texts are equal and the prefill had decode steps beside it."""
        different = [name for name, same in self.equal.items() if not same]
        if different:
            return f"not stock's text: {', '.join(different)}{self._rounding()}"
        if self.pdmux.ttft_ms is None or self.stock.ttft_ms is None:
            return "the document got no first token"
        if self.decode_steps == 0:
            return "no decode step ran beside the prefill: the chats had ended; raise --max-tokens"
        return None

    def as_json(self) -> dict[str, Any]:
        """All of it; times in ms, null where there is none."""
        facts, equal = self.facts, self.equal
        return {
            "texts_equal": all(equal.values()),
            "decode_steps_during_prefill": self.decode_steps,
            "layer_groups": self.layer_groups,
            **_times(self.pdmux),
            "stock": _times(self.stock) | {"decode_steps_during_prefill": len(self.stock.decode_steps_ms)},
            "stock_chunked": _times(self.chunked)
            | {
                "chunk_tokens": facts.chunk_tokens,
                "decode_steps_during_prefill": len(self.chunked.decode_steps_ms),
                "texts_equal": all(self.equal_of(self.chunked).values()),
            },
            "failure": self.failure,
            "model": facts.model,
            "dtype": facts.dtype,
            "layers": facts.layers,
            "vllm": facts.vllm,
            "machine": {"cpus": facts.cpus, "device": facts.device},
            "chats": facts.chats,
            "document_tokens": facts.document_tokens,
            "max_tokens": facts.max_tokens,
            "texts": [_text(name, text, self.stock.texts[name]) for name, text in self.pdmux.texts.items()],
            "timeline": [[s.first_layer, s.end_layer, s.decode_batch, _rounded(s.ms)] for s in self.pdmux.timeline],
        }

    def _rounding(self) -> str:
        if self.facts.dtype == "float32":
            return ""
        return f" (in {self.facts.dtype}, batches of other sizes can round to another token: try --dtype float32)"


def summary(times_ms: Sequence[float]) -> Summary | None:
    """None when there are no times."""
    if not times_ms:
        return None
    return Summary(median(times_ms), quantile(times_ms, 0.99), max(times_ms))


def _times(run: Run) -> dict[str, Any]:
    return {
        "ttft_ms": None if run.ttft_ms is None else _rounded(run.ttft_ms),
        "itl_ms": _summary_json(run.itl_during_prefill_ms),
        "itl_overall_ms": _summary_json(run.itl_ms),
        "others_cpu_share": None if run.others_cpu_share is None else round(run.others_cpu_share, 2),
    }


def _summary_json(times_ms: Sequence[float]) -> dict[str, float] | None:
    values = summary(times_ms)
    return None if values is None else {name: _rounded(value) for name, value in vars(values).items()}


def _text(name: str, text: str, stock: str) -> dict[str, Any]:
    row: dict[str, Any] = {"request": name, "text": text, "equal": text == stock}
    return row if text == stock else row | {"stock_text": stock}


def _rounded(ms: float) -> float:
    return round(ms, 2)
