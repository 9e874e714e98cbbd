"""Metrics: what is written to the file, what is shown, and how the rate is measured."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fx_feather.errors import DataError
from fx_feather.metrics import MetricsLog, ProgressLine, Stopwatch, bits_per_byte


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bits_per_byte():
    assert bits_per_byte(math.log(2)) == 1
    assert bits_per_byte(math.log(256)) == 8


def test_each_line_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "deep" / "folder" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(step=1, loss=5.5)
        assert lines(path) == [{"step": 1, "loss": 5.5}]
        log.write(step=2, kind="eval")
        assert lines(path)[1] == {"step": 2, "kind": "eval"}


def test_values_become_plain_json(tmp_path):
    path = tmp_path / "m"
    with MetricsLog(path) as log:
        log.write(
            tensor=torch.tensor(2.5),
            array=np.float32(0.5),
            integer=np.int64(3),
            one=torch.tensor([7]),
            nothing=None,
            flag=True,
            nested={"a": [torch.tensor(1), (2.0, "x")], 3: math.inf},
            bad=[math.nan, torch.tensor(-math.inf)],
        )
    assert lines(path) == [
        {
            "tensor": 2.5,
            "array": 0.5,
            "integer": 3,
            "one": 7,
            "nothing": None,
            "flag": True,
            "nested": {"a": [1, [2.0, "x"]], "3": "inf"},
            "bad": ["nan", "-inf"],
        }
    ]


def test_values_that_are_no_json_are_refused_all_at_once_and_write_nothing(tmp_path):
    path = tmp_path / "m"
    with MetricsLog(path) as log:
        with pytest.raises(DataError) as caught:
            log.write(step=1, weight=torch.zeros(3), array=np.zeros(2), thing=object())
        text = str(caught.value)
        for said in ("3 problems:", "log.write(weight=...)", "a Tensor", "'array' is no single number", "a object"):
            assert said in text
        for part in ("got:", "problem:", "rule:", "fix:"):
            assert part in text
        log.write(step=2)
    assert lines(path) == [{"step": 2}]


def test_a_file_is_added_to_and_half_a_line_is_left_behind(tmp_path):
    path = tmp_path / "m"
    with MetricsLog(path) as log:
        log.write(step=1)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    with MetricsLog(path) as log:
        log.write(step=3)
    with MetricsLog(path) as log:
        log.write(step=4)
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 3}', '{"step": 4}']


def test_only_rank_zero_writes(tmp_path):
    with MetricsLog(tmp_path / "m", rank=1) as log:
        log.write(step=1, weight=torch.zeros(3))
    assert not (tmp_path / "m").exists()


def test_after_close_a_write_does_nothing(tmp_path):
    log = MetricsLog(tmp_path / "m")
    log.close()
    log.close()
    log.write(step=1)
    assert (tmp_path / "m").read_text() == ""


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "file" / "m", "cannot be written")):
        with pytest.raises(DataError) as caught:
            MetricsLog(path)
        text = str(caught.value)
        for part in (said, str(path), "got:", "problem:", "rule:", "fix:"):
            assert part in text


def test_the_stopwatch_leaves_out_the_first_lap_and_pauses():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    assert math.isnan(watch.tokens_per_second)
    now[0] = 100.0
    assert math.isnan(watch.lap(1000)), "the first lap compiles"
    assert math.isnan(watch.tokens_per_second)
    now[0] = 102.0
    assert watch.lap(1000) == 500
    with watch.paused():
        now[0] = 1000.0
    now[0] += 1.0
    assert watch.lap(1000) == 1000
    assert watch.tokens_per_second == 2000 / 3
    assert (watch.laps, watch.tokens, watch.seconds) == (3, 2000, 3.0)


def test_a_pause_ends_with_an_error_inside_it():
    now = [0.0]
    watch = Stopwatch(skip=0, clock=lambda: now[0])

    def failing() -> None:
        with watch.paused():
            now[0] = 50.0
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    now[0] = 52.0
    assert watch.lap(10) == 5


def test_a_clock_that_stands_still_gives_no_rate():
    watch = Stopwatch(skip=0, clock=lambda: 0.0)
    assert math.isnan(watch.lap(10))


def test_elsewhere_than_on_a_terminal_each_step_is_a_line():
    out = io.StringIO()
    progress = ProgressLine(total=100, stream=out)
    progress.show(1, loss=math.log(256), tokens_per_second=math.nan, grad_norm=1.0, lr=1e-3)
    progress.show(2, loss=0.0, tokens_per_second=1_300_000.0)
    progress.close()
    assert out.getvalue().splitlines() == [
        "step   1/100  loss 5.5452  8.000 bits/byte  - tokens/s  grad norm 1.000  lr 1.00e-03",
        "step   2/100  loss 0.0000  0.000 bits/byte  1.30M tokens/s",
    ]


@pytest.mark.parametrize(
    ("rate", "shown"), [(950.4, "950"), (1000.0, "1.00k"), (41_250.0, "41.2k"), (2.5e6, "2.50M"), (12e9, "12.0G")]
)
def test_rates_are_short(rate, shown):
    out = io.StringIO()
    ProgressLine(stream=out).show(1, loss=1.0, tokens_per_second=rate)
    assert f"  {shown} tokens/s" in out.getvalue()


def test_on_a_terminal_the_line_is_written_over():
    out = Terminal()
    progress = ProgressLine(stream=out)
    progress.show(1, loss=1.0, grad_norm=123.0)
    progress.show(2, loss=1.0)
    progress.note("held-out 2.5 bits/byte")
    progress.show(3, loss=1.0)
    progress.close()
    progress.close()
    first, second, noted = out.getvalue().split("\r")
    assert len(second) == len(first), "a shorter line covers the longer one"
    note, third, rest = noted.split("\n")
    assert note.rstrip() == "held-out 2.5 bits/byte" and len(note) == len(second.rstrip())
    assert third.lstrip().startswith("step      3") and rest == ""


def test_only_some_steps_and_the_last_are_shown():
    out = io.StringIO()
    progress = ProgressLine(total=25, every=10, stream=out)
    for step in range(1, 26):
        progress.show(step, loss=1.0)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["10/25", "20/25", "25/25"]


def test_only_rank_zero_shows():
    out = io.StringIO()
    progress = ProgressLine(rank=1, stream=out)
    progress.show(1, loss=1.0)
    progress.note("note")
    progress.close()
    assert out.getvalue() == ""


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_an_interval_below_one_is_refused(every):
    with pytest.raises(DataError, match="an integer of 1 or more") as caught:
        ProgressLine(every=every)
    assert f"every={every!r}" in str(caught.value) and "fix:" in str(caught.value)
