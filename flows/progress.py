"""What a running job shows: a live display on a terminal, plain lines elsewhere, nothing when silent.

Stages tell a `Progress` what happens and never ask what it does with it. Everything goes to the given stream
(stderr for the command line), so that results on stdout stay clean.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blend_core.engines.base import StepWindow

BAR_WIDTH = 32
WINDOWS_OF_A_RATE = 8
SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """Where a job reports to while it runs. Calls are cheap and never raise for what they are told."""

    def stage_started(self, stage: str, detail: str) -> None:
        """A stage (`ingest`, `plan`, `infer`, `export`, `report`) begins."""

    def stage_finished(self, stage: str, detail: str) -> None:
        """The stage is done; `detail` is its outcome in one line."""

    def counted(self, num_done: int, num_total: int | None) -> None:
        """`num_done` of the running stage's items are done; `num_total` is None while it is not known."""

    def window(self, window: StepWindow, rank: int) -> None:
        """The engine of a rank closed a window of steps."""

    def note(self, message: str) -> None:
        """Something worth a line of its own."""


class SilentProgress:
    """Shows nothing."""

    def stage_started(self, stage: str, detail: str) -> None:
        """Shows nothing."""

    def stage_finished(self, stage: str, detail: str) -> None:
        """Shows nothing."""

    def counted(self, num_done: int, num_total: int | None) -> None:
        """Shows nothing."""

    def window(self, window: StepWindow, rank: int) -> None:
        """Shows nothing."""

    def note(self, message: str) -> None:
        """Shows nothing."""


class BatchRates:
    """Rates of the batches in flight, from the last few windows of each rank, and prefix sharing since the
    start.

    Attributes:
        last: the latest window.
    """

    __slots__ = ("_num_cached_tokens", "_num_computed_tokens", "_recent", "last")

    def __init__(self) -> None:
        self.last: StepWindow | None = None
        self._recent: dict[int, deque[StepWindow]] = {}
        self._num_cached_tokens = 0
        self._num_computed_tokens = 0

    def add(self, window: StepWindow, rank: int) -> None:
        """Takes one more window of a rank; mutates."""
        self.last = window
        self._recent.setdefault(rank, deque(maxlen=WINDOWS_OF_A_RATE)).append(window)
        self._num_cached_tokens += window.num_cached_tokens
        self._num_computed_tokens += window.num_prefill_tokens - window.num_recomputed_tokens

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens (cached ones included) and output tokens per second of all ranks, over the recent
        windows.
        """
        return sum(_tokens_per_s(windows) for windows in self._recent.values())

    @property
    def prefix_sharing(self) -> float:
        """Share of prompt tokens served from the cache so far."""
        num_tokens = self._num_cached_tokens + self._num_computed_tokens
        return self._num_cached_tokens / num_tokens if num_tokens else 0.0

    def line(self) -> str:
        """The rates in one line of text."""
        if self.last is None:
            return ""
        density = self.last.measured_density
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, sharing {self.prefix_sharing:.0%}, "
            f"density {'-' if density is None else format(density, '.2f')}, "
            f"running {self.last.num_running_left:.0f} left + {self.last.num_running_right:.0f} right"
        )


def _tokens_per_s(windows: Iterable[StepWindow]) -> float:
    num_tokens, duration_s = 0, 0.0
    for window in windows:
        num_tokens += window.num_prefill_tokens + window.num_cached_tokens + window.num_decode_tokens
        duration_s += window.duration_s
    return num_tokens / duration_s if duration_s > 0 else 0.0


class LineProgress:
    """Plain lines for logs: every start and end of a stage, counts at most once every few seconds."""

    __slots__ = ("_clock", "_interval_s", "_next_at", "_rates", "_stage", "_stream")

    def __init__(
        self, stream: TextIO, clock: Callable[[], float], interval_s: float = SECONDS_BETWEEN_LINES
    ) -> None:
        """`clock` gives rising seconds, such as `time.monotonic`."""
        self._stream = stream
        self._clock = clock
        self._interval_s = interval_s
        self._next_at = clock()
        self._stage = ""
        self._rates = BatchRates()

    def stage_started(self, stage: str, detail: str) -> None:
        """Prints a line."""
        self._stage = stage
        self._next_at = self._clock() + self._interval_s
        self._print(f"{stage}: {detail}")

    def stage_finished(self, stage: str, detail: str) -> None:
        """Prints a line."""
        self._print(f"{stage}: done, {detail}" if detail else f"{stage}: done")

    def counted(self, num_done: int, num_total: int | None) -> None:
        """Prints a line unless one was printed within the interval."""
        if self._clock() < self._next_at:
            return
        self._next_at = self._clock() + self._interval_s
        count = f"{num_done:,}" if num_total is None else f"{num_done:,} of {num_total:,}"
        rates = f", {self._rates.line()}" if self._stage == "infer" and self._rates.last else ""
        self._print(f"{self._stage}: {count}{rates}")

    def window(self, window: StepWindow, rank: int) -> None:
        """Keeps the rates for the next line."""
        self._rates.add(window, rank)

    def note(self, message: str) -> None:
        """Prints a line."""
        self._print(message)

    def _print(self, line: str) -> None:
        # Who read the lines has gone, or the disk that takes them is full: no reason to end the job.
        with suppress(OSError):
            # In one piece: threads write notes, too.
            self._stream.write(f"{line}\n")
            self._stream.flush()


@dataclass(slots=True)
class _Stage:
    name: str
    detail: str
    started_at: float
    finished_at: float | None = None


class LiveProgress:
    """A live display for a terminal: stages, a bar, and the batch in flight with its balance."""

    __slots__ = ("_clock", "_live", "_num_done", "_num_total", "_rates", "_stages")

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._num_done = 0
        self._num_total: int | None = None
        self._rates = BatchRates()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def open(self) -> None:
        """Takes over the bottom of the terminal."""
        self._live.start()

    def close(self) -> None:
        """Leaves the last picture on the terminal. Idempotent."""
        self._live.stop()

    def stage_started(self, stage: str, detail: str) -> None:
        """Adds the stage, or starts it anew."""
        self._stages[stage] = _Stage(stage, detail, self._clock())
        self._num_done, self._num_total = 0, None

    def stage_finished(self, stage: str, detail: str) -> None:
        """Ticks the stage off."""
        entry = self._stages.setdefault(stage, _Stage(stage, detail, self._clock()))
        entry.detail, entry.finished_at = detail, self._clock()
        self._num_done, self._num_total = 0, None

    def counted(self, num_done: int, num_total: int | None) -> None:
        """Moves the bar."""
        self._num_done, self._num_total = num_done, num_total

    def window(self, window: StepWindow, rank: int) -> None:
        """Shows the batch in flight."""
        self._rates.add(window, rank)

    def note(self, message: str) -> None:
        """Prints a line above the display."""
        self._live.console.print(message, markup=False, highlight=False)

    def render(self) -> RenderableType:
        """The present picture."""
        stages = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            done = stage.finished_at is not None
            end = stage.finished_at if stage.finished_at is not None else self._clock()
            stages.add_row(
                Text("✓" if done else "…", style="green" if done else "yellow"),
                Text(stage.name, style="" if done else "bold"),
                Text(f"{end - stage.started_at:6.1f} s", style="dim"),
                Text(stage.detail, overflow="ellipsis", no_wrap=True),
            )
        parts: list[RenderableType] = [stages]
        running = any(stage.finished_at is None for stage in self._stages.values())
        if running and self._num_done:
            parts.append(self._bar())
        if running and self._rates.last is not None:
            parts.append(self._batch(self._rates.last))
        return Group(*parts)

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        count = f"{self._num_done:,}" + ("" if self._num_total is None else f" of {self._num_total:,}")
        bar = ProgressBar(
            total=self._num_total, completed=self._num_done, width=BAR_WIDTH, pulse=self._num_total is None
        )
        row.add_row("  requests", bar, count)
        return row

    def _batch(self, window: StepWindow) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        rows.add_row(
            "  speed",
            f"{self._rates.tokens_per_s:,.0f} tokens/s, "
            f"{self._rates.prefix_sharing:.0%} of prompt tokens from the cache",
        )
        rows.add_row("  balance", balance_bar(window.compute_s, window.memory_s))
        rows.add_row(
            "  running",
            f"{window.num_running_left:.0f} left + {window.num_running_right:.0f} right, "
            f"KV {window.kv_usage:.0%}",
        )
        return rows


def balance_bar(compute_s: float, memory_s: float, width: int = BAR_WIDTH) -> Text:
    """Compute against memory time of a batch as one bar of `width` cells, with its density."""
    total_s = compute_s + memory_s
    share = compute_s / total_s if total_s > 0 else 0.0
    num_compute = round(share * width)
    density = f"{compute_s / memory_s:.2f}" if memory_s > 0 else "no KV read"
    return Text.assemble(
        ("█" * num_compute, "cyan"),
        ("█" * (width - num_compute), "magenta"),
        f" compute {share:.0%} | memory {1 - share:.0%}, density {density}",
    )


@contextmanager
def shown_progress(stream: TextIO, clock: Callable[[], float]) -> Iterator[Progress]:
    """A live display when `stream` is a terminal, else plain lines; the display is closed on the way out."""
    if not stream.isatty():
        yield LineProgress(stream, clock)
        return
    live = LiveProgress(Console(file=stream), clock)
    live.open()
    try:
        yield live
    finally:
        live.close()
