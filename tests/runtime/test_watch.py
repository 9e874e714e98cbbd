"""Ranks that wait for each other in different calls end within seconds; those that are early or late go on."""

import threading
import time

import pytest
import torch.distributed as dist

from fx_feather.watch import Watch
from tests.runtime.launch import launch

PARTS = ("got:", "problem:", "rule:", "fix:")


@pytest.mark.parametrize(
    ("turns", "ends"),
    [
        ([["step", "whole"], ["step", "step"]], True),
        ([["step", "whole"], ["step", "whole"]], False),
        ([["step", "whole"], ["step"]], False),
        ([["step", "whole"], ["step", "whole", "step"]], False),
        ([["step", "whole"], []], False),
    ],
    ids=["another call", "the same", "a late one", "an early one", "one that does other work"],
)
def test_a_watch(turns: list[list[str]], ends: bool) -> None:
    store, said = dist.HashStore(), [[], []]
    watches = [Watch(store, r, 2, said[r].append, patience_s=0.1) for r in range(2)]
    for watch, own in zip(watches, turns, strict=True):
        for doing in own:
            watch.enter(doing)
    time.sleep(0.5)
    for watch in watches:
        watch.stop()
    assert [bool(s) for s in said] == [ends, ends]
    for text in (t for s in said for t in s):
        assert "rank 0: whole; rank 1: step" in text and "each the 2. of its rank" in text
        assert all(part in text for part in PARTS)
    assert not any(t.name == "fx_feather watch" for t in threading.enumerate())


def test_what_a_rank_has_left_is_not_waited_in() -> None:
    store, said = dist.HashStore(), []
    watches = [Watch(store, r, 2, said.append, patience_s=0.1) for r in range(2)]
    for watch, doing in zip(watches, ("a", "b"), strict=True):
        watch.enter(doing)
        watch.leave()
    time.sleep(0.3)
    for watch in watches:
        watch.stop()
    assert not said


@pytest.mark.parametrize("job", ["alone_whole", "alone_first"])
def test_one_rank_alone_in_a_call_ends_all_in_seconds(job: str, tmp_path) -> None:
    ended = launch(job, 2, tmp_path, timeout_s=120)
    assert all(e.code == 1 and e.seconds < 60 for e in ended)
    text = "".join(e.text for e in ended)
    what = {"alone_whole": "gathering whole values", "alone_first": "comparing programs"}[job]
    assert f"rank 0: {what}; rank 1: section 'first' of program" in text
    assert "wait for each other" in text and "if rank == 0:" in text
