"""A unit of any length is cut into a forward and a backward, whatever the backward computes again."""

import sys

import pytest
import torch

from fx_feather.passes.differentiate import Place, linearize


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_chain_longer_than_the_stack_of_python(remat: str) -> None:
    length = sys.getrecursionlimit() + 100

    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(length):
            x = torch.sin(x)
        return [x]

    unit = linearize(chain, [Place((4,), (1,), torch.float32)], [True], [True], "cpu", "chain", remat)
    assert unit.backward is not None and unit.grads == (0,)
    assert (len(unit.saved_nodes) == 0) == (remat == "full")
