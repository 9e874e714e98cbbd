"""What a run shows and keeps of itself: JSON lines, a progress line, and tokens per second."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .errors import DataError, fail, message, raise_all
from .settings import check, count


def bits_per_byte(nats: float) -> float:
    """A loss in nats per byte, as cross-entropy gives it for a model of bytes, in bits per byte.

    >>> bits_per_byte(math.log(256))
    8.0
    """
    return nats / math.log(2)


class MetricsLog:
    """Appends one JSON object a line to a file, each line handed over whole, so that a killed run keeps all it wrote.

    A file that exists is added to, and where a killed run left half a line, the next one starts below it. Only rank 0
    writes: on other ranks every call does nothing, so no caller needs to ask. Values are numbers, strings, None, and
    lists or dicts of them. A tensor or array of one element becomes its number. NaN and infinity, for which JSON has no
    word, become the strings "nan", "inf" and "-inf".

    Args:
        path: the file; missing folders above it are made.
        rank: rank of this process.

    Raises:
        DataError: the file cannot be written, or a value that is none of the above.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with MetricsLog(path) as log:
    ...     log.write(step=1, loss=5.5)
    >>> path.read_text()
    '{"step": 1, "loss": 5.5}\\n'
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0):
        self.path = Path(path)
        self._file = None
        if rank != 0:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # In append mode every write goes to the end of the file, whoever else has it open.
            self._file = self.path.open("ab+")
            if self._file.tell() > 0:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            fail(
                DataError,
                call=f"MetricsLog({os.fspath(path)!r})",
                got=f"the file {str(self.path)!r}, seen from {os.getcwd()!r}",
                number=f"it cannot be written: {error.strerror or error}",
                rule="metrics are appended to one file, in a folder that this user can write",
                fix="MetricsLog('runs/metrics.jsonl')",
            )

    def write(self, **values: Any) -> None:
        """Appends one line, its keys in the order given."""
        if self._file is None:
            return
        plain, odd = {}, []
        for name, value in values.items():
            try:
                plain[name] = _plain(value)
            except (TypeError, ValueError, RuntimeError):
                odd.append(
                    message(
                        call=f"log.write({name}=...)",
                        got=f"a {type(value).__name__}: {str(value)[:80]}",
                        number=f"{name!r} is no single number, string, None, list or dict",
                        rule="a line of metrics is plain JSON, so that any tool can read it",
                        fix=f"log.write({name}=float(...)), or x.tolist() for a whole tensor",
                    )
                )
        raise_all(DataError, odd)
        self._file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; later writes do nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "item"):  # a tensor or array: anything but one element raises
        return _plain(value.item())
    raise TypeError(type(value).__name__)


class Stopwatch:
    """Measures tokens per second of training by the wall clock.

    The rate is the tokens that `lap` is told of (those of the global batch, for the rate of all ranks together) divided
    by the wall time of this process between calls of `lap`, everything between two steps included. The first `skip`
    laps are left out, time and tokens both: they compile and warm up. Time inside `with watch.paused():` is left out
    as well (evaluation, saving). A device that works asynchronously must have finished the step when `lap` is called:
    read the loss first.

    Args:
        skip: laps at the start that do not count.
        clock: seconds, from any start.

    >>> seconds = iter([0.0, 9.0, 10.0, 11.0])
    >>> watch = Stopwatch(clock=lambda: next(seconds))
    >>> [watch.lap(500), watch.lap(500), watch.lap(1500)]         # the first lap compiles
    [nan, 500.0, 1500.0]
    >>> watch.tokens_per_second                                   # of all laps that count
    1000.0
    """

    def __init__(self, skip: int = 1, clock: Callable[[], float] = time.perf_counter):
        self.laps, self.seconds, self.tokens = 0, 0.0, 0
        self._skip, self._clock = skip, clock
        self._last = clock()

    def lap(self, tokens: int) -> float:
        """Ends a lap of so many tokens; its tokens per second, or NaN for a lap that does not count."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        self.laps += 1
        if self.laps <= self._skip:
            return math.nan
        self.seconds += seconds
        self.tokens += tokens
        return _rate(tokens, seconds)

    @property
    def tokens_per_second(self) -> float:
        """Over all laps that count; NaN before the first of them."""
        return _rate(self.tokens, self.seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the `with` block out of the lap it is in."""
        start = self._clock()
        try:
            yield
        finally:
            self._last += self._clock() - start


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else math.nan


class ProgressLine:
    """Shows a run on one line: step, loss, bits per byte, tokens per second, gradient norm, learning rate.

    On a terminal the line is written over itself. Elsewhere (a file, a pipe, CI) each is a line of its own. Only rank 0
    shows anything. A value that is not given, or is NaN where it was not measured, is left out or shown as `-`.

    Args:
        total: number of steps of the run, shown beside the step.
        every: show each so many steps, and the last.
        rank: rank of this process.
        stream: where to, standard output by default.

    >>> line = ProgressLine(total=200, every=10, stream=sys.stdout)
    >>> line.show(20, loss=1.5, tokens_per_second=41_250.0, grad_norm=0.5, lr=3e-4)
    step  20/200  loss 1.5000  2.164 bits/byte  41.2k tokens/s  grad norm 0.500  lr 3.00e-04
    >>> line.show(21, loss=1.5)
    """

    def __init__(self, total: int | None = None, every: int = 1, rank: int = 0, stream: TextIO | None = None):
        rule = "the line is shown each so many steps, an integer of 1 or more"
        check(DataError, "ProgressLine", {"every": every}, [("every", count(1), rule, "every=1")])
        self.total, self.every = total, every
        self._out = None if rank != 0 else stream if stream is not None else sys.stdout
        self._tty = self._out is not None and self._out.isatty()
        self._open = 0  # length of the line that stands on the terminal without an end

    def show(
        self,
        step: int,
        loss: float,
        *,
        tokens_per_second: float = math.nan,
        grad_norm: float | None = None,
        lr: float | None = None,
    ) -> None:
        """Shows a step, if it is one of those to show.

        Args:
            step: number of the step, the first is 1.
            loss: nats per byte.
            tokens_per_second: as `Stopwatch` measures it.
            grad_norm: global norm of the gradient, before clipping.
            lr: learning rate of the step.
        """
        if step % self.every and step != self.total:
            return
        of = "" if self.total is None else f"/{self.total}"
        parts = [
            f"step {step:>{len(str(self.total)) if self.total else 6}}{of}",
            f"loss {loss:.4f}",
            f"{bits_per_byte(loss):.3f} bits/byte",
            f"{_short(tokens_per_second)} tokens/s",
        ]
        if grad_norm is not None:
            parts.append(f"grad norm {grad_norm:.3f}")
        if lr is not None:
            parts.append(f"lr {lr:.2e}")
        self._write("  ".join(parts), stays=not self._tty)

    def note(self, text: str) -> None:
        """Prints lines that stay, such as an evaluation, above the progress line."""
        self._write(text, stays=True)

    def close(self) -> None:
        """Ends the line, so that what comes next starts on its own."""
        if self._out is not None and self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = 0

    def _write(self, text: str, stays: bool) -> None:
        if self._out is None:
            return
        # A shorter text must cover all of the line that stands there.
        over = "\r" + text.ljust(self._open) if self._open else text
        self._out.write(over + ("\n" if stays else ""))
        self._out.flush()
        self._open = 0 if stays else len(text)


def _short(number: float) -> str:
    """Three digits or four and a unit: 950, 41.2k, 1.30M."""
    if math.isnan(number):
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{2 if number < 10 * size else 1}f}{unit}"
    return f"{number:.0f}"
