"""A process that builds program after program does not grow: what is garbage goes before the next build."""

import gc
import weakref

import torch

import fx_feather as ff
from fx_feather import garbage


class Node:
    """Part of a cycle, which only a collection takes."""

    def __init__(self) -> None:
        self.me, self.own = self, [[] for _ in range(100_000)]


def test_garbage_of_earlier_builds_does_not_pile_up() -> None:
    alive: list[weakref.ref[Node]] = []
    most = 0
    for _ in range(100):
        with garbage.kept():
            alive.append(weakref.ref(Node()))
        most = max(most, sum(x() is not None for x in alive))
    assert 1 <= most < 60, "collected now and then: neither in every build nor never"
    assert gc.isenabled()


def test_a_program_that_nobody_holds_is_gone() -> None:
    def compiled() -> weakref.ref[ff.Compiled]:
        f = ff.compile(
            lambda p, x: p * x, template=ff.Param("embed", (4,)), mesh=ff.Mesh(), layout=ff.Layout(),
            batch=torch.ones(2, 4), batch_dims="batch embed",
        )  # fmt: skip
        f.run_whole(torch.ones(4), torch.ones(2, 4))
        return weakref.ref(f)

    found = [compiled() for _ in range(3)]
    gc.collect()
    assert [x() for x in found] == [None] * 3, "something of the process keeps it"
