"""The watch of a rank: ranks that wait for each other in different calls end within seconds, and say where each is."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import message

#: Seconds after which a rank tells the others what it waits in.
PATIENCE_S = 5.0


@dataclasses.dataclass
class Watch:
    """What a rank is in, beside what the others are in, by way of the world's store.

    All ranks take the same turns in the same order. Two that are in turns of one number but of another kind wait for
    each other forever: a rank that called `whole` alone, or one that left a step out. No collective can be withdrawn
    on gloo, so the rank ends. Ranks in turns of other numbers are only early or late.

    Attributes:
        store: shared by all ranks.
        rank, size: of the world.
        end: called with the message.
    """

    store: Any
    rank: int
    size: int
    end: Callable[[str], None]
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self._turns = 0
        self._now: tuple[int, str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fx_feather watch", daemon=True)
        self._thread.start()

    def enter(self, doing: str) -> None:
        """This rank begins a turn."""
        self._turns += 1
        self._now = (self._turns, doing, time.monotonic())

    def leave(self) -> None:
        """This rank has ended its turn."""
        self._now = None

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _look(self) -> None:
        told = 0
        while not self._stopped.wait(self.patience_s / 5):
            now = self._now
            if now is None or time.monotonic() - now[2] < self.patience_s:
                continue
            turn, doing, _ = now
            with contextlib.suppress(Exception):  # the store goes with the rank that holds it
                if told != turn:
                    self.store.set(f"waits/{self.rank}", f"{turn} {doing}")
                    told = turn
                there = {r: self._waits(r) for r in range(self.size) if r != self.rank}
                others = {r: what for r, (at, what) in there.items() if at == turn}
                if any(what != doing for what in others.values()) and self._now is now:
                    self.end(_report(self.rank, turn, {self.rank: doing, **others}))

    def _waits(self, rank: int) -> tuple[int, str]:
        key = f"waits/{rank}"
        if not self.store.check([key]):
            return 0, ""
        turn, _, doing = self.store.get(key).decode().partition(" ")
        return int(turn), doing


def _report(rank: int, turn: int, found: dict[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for r in sorted(found):
        groups.setdefault(found[r], []).append(r)
    return message(
        call=f"rank {rank} waits in {found[rank]}",
        got="; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {doing}" for doing, r in groups.items()),
        number=f"{len(groups)} different calls, each the {turn}. of its rank, wait for each other",
        rule="every rank calls steps, evaluations, whole(...) and saves, in the same order",
        fix="take the call out of what some ranks alone run, such as `if rank == 0:`; print there what all computed",
    )


def end_process(text: str) -> None:
    """Ends this process with a message: its main thread is in a collective, which nothing can withdraw."""
    sys.stderr.write(f"RankError: {text}\n")
    sys.stderr.flush()
    os._exit(1)
