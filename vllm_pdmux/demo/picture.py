# SPDX-License-Identifier: Apache-2.0
"""What a person sees: the chats as they stream, which layers ran beside which decode step, and the numbers."""

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_pdmux.demo.comparison import Comparison, summary
from vllm_pdmux.demo.drive import Progress, Run
from vllm_pdmux.demo.workload import DOCUMENT, Workload

Watch = Callable[[Progress], None]

STOCK, PDMUX = "stock vLLM", "with pdmux"
_LIVE_LINES = 3  # of each chat's text
_PANEL_HEIGHT = _LIVE_LINES + 2
_REFRESH_S = 0.1
_WIDEST = 100  # columns
_WIDEST_BAR = 60
_BUSY = 0.1  # share of the CPUs from which what others use is worth a mention


class Silent:
    """No picture, for --json: `say` gets one line for each thing that takes time."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def loading(self, name: str) -> None:
        """An engine is about to start."""
        self._say(f"{name}: starting the engine")

    @contextmanager
    def watching(self, name: str, workload: Workload, layers: int) -> Iterator[Watch]:
        """A run is in progress; yields what has to be called as it goes."""
        self._say(f"{name}: {describe(workload)}")
        yield lambda progress: None

    def ran(self, name: str, run: Run) -> None:
        """A run has ended."""
        self._say(f"{name}: {outcome(run)}")

    def show(self, comparison: Comparison) -> None:
        """All runs have ended."""


class Picture(Silent):
    """On a terminal the chats are shown as they stream; elsewhere their texts are printed at the end."""

    def __init__(self, console: Console):
        super().__init__(lambda line: console.print(Text(line, style="dim"), soft_wrap=not console.is_interactive))
        self._console = console

    @contextmanager
    def watching(self, name: str, workload: Workload, layers: int) -> Iterator[Watch]:
        if not self._console.is_interactive:
            with super().watching(name, workload, layers) as watch:
                yield watch
            return
        # The last run's panels stay: its texts are the others' too.
        with Live(console=self._console, auto_refresh=False, transient=name != PDMUX) as live:

            def draw(progress: Progress) -> None:
                live.update(panels(name, workload, layers, progress, self._console.size), refresh=True)

            yield _throttled(draw)

    def show(self, comparison: Comparison) -> None:
        show, on_paper = self._console.print, not self._console.is_interactive
        if on_paper:
            for line in texts(comparison):
                show(line, soft_wrap=True)
        show(timeline(comparison))
        show(numbers(comparison))
        for line in conclusions(comparison):
            show(line, soft_wrap=on_paper)


def chunked_name(tokens: int) -> str:
    """Of stock vLLM with chunks of so many tokens."""
    return f"stock, chunks of {tokens}"


def console(file: TextIO) -> Console:
    """Of the terminal's width, but no wider than is good to read."""
    made = Console(file=file, highlight=False)
    made.width = min(made.width, _WIDEST) if made.is_terminal else _WIDEST
    return made


# --- while it runs ----------------------------------------------------------------------------------------------------


def panels(name: str, workload: Workload, layers: int, progress: Progress, size: ConsoleDimensions) -> RenderableType:
    """A panel for each chat, two in a row, as many as fit, and one for the document."""
    shown = workload.chats[: 2 * max(1, (size.height - 2) // _PANEL_HEIGHT - 1)]
    hidden = len(workload.chats) - len(shown)
    heading = f"{name}: {describe(workload)}" + (f" ({hidden} chats are not shown)" if hidden else "")
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    cells = [_chat_panel(chat.name, chat.question, progress, size.width // 2) for chat in shown]
    right_cells: list[RenderableType] = [*cells[1::2], ""]
    for left, right in zip(cells[::2], right_cells, strict=False):
        grid.add_row(left, right)
    state = _prefill_state(name, layers, progress)
    return Group(Text(heading, style="bold"), grid, _document_panel(workload, state, progress, size.width))


def _chat_panel(name: str, question: str, progress: Progress, width: int) -> Panel:
    ended = name in progress.finished
    lines = tail(progress.texts.get(name, ""), width - 4, _LIVE_LINES)
    return Panel(
        Text("\n".join(lines)),
        title=Text(question, style="bold"),
        title_align="left",
        border_style="green" if ended else "cyan",
        height=_PANEL_HEIGHT,
        box=box.ROUNDED,
    )


def _document_panel(workload: Workload, state: str, progress: Progress, width: int) -> Panel:
    tokens = len(workload.document.token_ids)
    lines = tail(progress.texts.get(DOCUMENT, ""), width - 4, _LIVE_LINES - 1)
    return Panel(
        Group(Text(state, style="yellow"), Text("\n".join(lines))),
        title=Text(f"document of {tokens:,} tokens: {workload.document.question}", style="bold"),
        title_align="left",
        border_style="green" if DOCUMENT in progress.finished else "yellow",
        height=_PANEL_HEIGHT,
        box=box.ROUNDED,
    )


def _prefill_state(name: str, layers: int, progress: Progress) -> str:
    if progress.has_first_token:
        return f"prefilled, {layers} layers"
    if not progress.document_arrived:
        return "arrives when every chat has streamed some tokens"
    if name == STOCK:
        return f"in prefill, all {layers} layers in one step: the chats wait"
    if name != PDMUX:
        return f"in prefill, a chunk through all {layers} layers in each step"
    return f"in prefill {layer_bar(0, progress.layers_done, layers)} {progress.layers_done}/{layers} layers"


def _throttled(draw: Watch) -> Watch:
    """`draw`, but seldom enough not to slow the demo down, and always when the document changes its state."""
    last_s, last_state = 0.0, None

    def watch(progress: Progress) -> None:
        nonlocal last_s, last_state
        state = (progress.document_arrived, progress.layers_done, progress.has_first_token, len(progress.finished))
        now_s = time.perf_counter()
        if state != last_state or now_s - last_s >= _REFRESH_S:
            last_s, last_state = now_s, state
            draw(progress)

    return watch


def tail(text: str, width: int, lines: int) -> list[str]:
    """The last `lines` lines of `text`, wrapped to `width` columns."""
    wrapped = [part for line in text.splitlines() if line.strip() for part in textwrap.wrap(line, max(width, 1))]
    return wrapped[-lines:]


# --- afterwards -------------------------------------------------------------------------------------------------------


def layer_bar(first: int, end: int, layers: int, widest: int = _WIDEST_BAR) -> str:
    """One character for each layer: ▒ ran before, █ [first, end), ░ to come. Scaled down to `widest` characters, where
    a group of layers that ran keeps one at least."""
    width = min(layers, widest)
    start = min(first * width // layers, width - 1)
    stop = end * width // layers
    stop = max(stop, start + 1) if end > first else start
    return "▒" * start + "█" * (stop - start) + "░" * (width - stop)


def timeline(comparison: Comparison) -> Table:
    """One row for each engine step in which the document was prefilled."""
    layers, chats = comparison.facts.layers, comparison.facts.chats
    title = "The steps from the document's arrival to its first token"
    table = Table(box=box.SIMPLE_HEAD, title=title, expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("decode batch", justify="right", no_wrap=True)
    table.add_column(f"layers of the prefill (of {layers})", no_wrap=True)
    table.add_column("step ms", justify="right", no_wrap=True)
    for name, run in ((STOCK, comparison.stock), (chunked_name(comparison.facts.chunk_tokens), comparison.chunked)):
        for number, ms in enumerate(run.decode_steps_ms, start=1):
            bar = Text(layer_bar(0, layers, layers), style="red")
            table.add_row(name if number == 1 else "", str(number), str(chats), bar, _ms(ms))
        table.add_section()
    for number, step in enumerate(comparison.pdmux.timeline, start=1):
        bar = Text(layer_bar(step.first_layer, step.end_layer, layers), style="green")
        name = PDMUX if number == 1 else ""
        table.add_row(name, str(number), str(step.decode_batch), bar, _ms(step.ms))
    return table


def numbers(comparison: Comparison) -> Table:
    """The engines side by side."""
    facts, runs = comparison.facts, comparison.runs
    during = [summary(run.itl_during_prefill_ms) for run in runs]
    overall = [summary(run.itl_ms) for run in runs]
    steps = *(len(run.decode_steps_ms) for run in runs[:-1]), comparison.decode_steps
    same = [sum(comparison.equal_of(run).values()) for run in runs[1:]]
    title = f"{facts.vllm}, {facts.dtype}, {facts.cpus} CPUs: {facts.chats} chats, {facts.document_tokens:,} tokens"
    table = Table(box=box.SIMPLE_HEAD, title=title, expand=True)
    table.add_column("")
    for name in (STOCK, chunked_name(facts.chunk_tokens), PDMUX):
        table.add_column(name, justify="right")
    table.add_row("TTFT of the document", *[_ms(run.ttft_ms, " ms") for run in runs])
    table.add_row("ITL of the chats during the prefill, median", *[_ms(s.median if s else None, " ms") for s in during])
    table.add_row(
        "ITL of the chats during the prefill, max", *[_ms(s.max if s else None, " ms") for s in during], style="bold"
    )
    table.add_row("ITL of the chats in the whole run, median", *[_ms(s.median if s else None, " ms") for s in overall])
    table.add_row("ITL of the chats in the whole run, p99", *[_ms(s.p99 if s else None, " ms") for s in overall])
    table.add_row("decode steps during the prefill", *map(str, steps))
    table.add_row("texts equal to stock's", "", *(f"{number} of {len(comparison.equal)}" for number in same))
    return table


def texts(comparison: Comparison) -> list[Text]:
    """Every answer, and whether it is stock's."""
    lines = []
    for name, text in comparison.pdmux.texts.items():
        mark = "equal to stock's" if comparison.equal[name] else "NOT STOCK'S"
        lines.append(Text(f"{name} ({mark}): {' '.join(text.split())}"))
    return lines


def conclusions(comparison: Comparison) -> list[Text]:
    """What the numbers show, and what they do not: of runs on busy CPUs nothing."""
    if comparison.failure is not None:
        return [Text(f"Failed: {comparison.failure}.", style="bold")]
    shares = [run.others_cpu_share or 0.0 for run in comparison.runs]
    if max(shares) >= _BUSY:
        used = ", ".join(f"{share:.0%}" for share in shares)
        return [
            Text(
                f"Other processes used {used} of the CPUs in these runs, so that their times cannot be compared: "
                "run it again when nothing else is busy."
            )
        ]
    return [Text(line, style="bold") for line in verdict(comparison)]


def verdict(comparison: Comparison) -> list[str]:
    """The two latencies that are traded, and on a CPU what is not to be seen there."""
    facts = comparison.facts
    pauses = [summary(run.itl_during_prefill_ms) for run in comparison.runs]
    stock, chunked, pdmux = (
        f"{_ms(pause.max if pause else None)} ms and {_ms(run.ttft_ms)} ms"
        for pause, run in zip(pauses, comparison.runs, strict=True)
    )
    lines = [
        f"The longest pause of a chat, and the document's TTFT: {stock} with stock vLLM, {chunked} with its chunks of "
        f"{facts.chunk_tokens} tokens, {pdmux} with the plugin."
    ]
    if _on_cpu(comparison):
        lines.append(
            "A CPU has no SMs to split, and the total work is the same: what you see is the mechanism, and chunks can "
            "do as well here. A gain needs a GPU."
        )
    return lines


def describe(workload: Workload) -> str:
    """The workload in a few words."""
    tokens = len(workload.document.token_ids)
    return f"{len(workload.chats)} chats stream, a document of {tokens:,} tokens arrives"


def outcome(run: Run) -> str:
    """A run in a few words."""
    longest = summary(run.itl_during_prefill_ms)
    pause = "no chat was streaming" if longest is None else f"the chats waited up to {_ms(longest.max)} ms for a token"
    return f"the document's first token after {_ms(run.ttft_ms)} ms; meanwhile {pause}"


def _on_cpu(comparison: Comparison) -> bool:
    return comparison.facts.device == "cpu"


def _ms(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return (f"{value:,.0f}" if value >= 100 else f"{value:.1f}") + unit
