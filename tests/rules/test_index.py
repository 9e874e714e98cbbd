"""An index outside of a split dim is NaN wherever it is looked up: no rank holds it, and zeros would hide it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fx_feather as ff
from fx_feather.errors import NonFiniteError

LOOKUPS = {
    "embedding": lambda w, i: torch.nn.functional.embedding(i, w),
    "index": lambda w, i: w[i],
    "index_select": lambda w, i: w.index_select(0, i),
    "gather": lambda w, i: w.gather(0, i.unsqueeze(-1).expand(-1, 3)),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i.unsqueeze(-1), 0),
}
VOCAB = 7


def looked_up(name: str, index: list[int]) -> Tensor:
    """Rows of a table that two ranks split, of which the second holds a row of padding."""
    template = {"table": ff.Param("vocab embed", (VOCAB, 3), ff.normal(1.0), torch.float64)}
    f = ff.compile(
        lambda p, i: LOOKUPS[name](p["table"], i),
        template=template,
        mesh=ff.Mesh(tp=2),
        layout=ff.Layout(compute={"vocab": "tp"}),
        batch=torch.tensor(index),
        batch_dims="batch",
        device="cpu",
    )
    params = ff.init(template)
    got = f.simulate(params, torch.tensor(index))
    inside = [k for k, i in enumerate(index) if i < VOCAB]
    assert torch.equal(got[inside], LOOKUPS[name](params["table"], torch.tensor(index)[inside]))
    return got


@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_that_nobody_holds_are_nan(name: str) -> None:
    got = looked_up(name, [0, VOCAB, 6, 3, VOCAB + 100])
    assert got[[1, 4]].isnan().all() and not got[[0, 2, 3]].isnan().any()


def test_a_step_with_a_token_or_a_target_of_another_vocabulary_is_not_applied() -> None:
    template = {"table": ff.Param("vocab embed", (VOCAB, 3), ff.normal(1.0), torch.float64)}

    def loss(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        h = torch.nn.functional.embedding(batch["tokens"], params["table"])
        nll = torch.nn.functional.cross_entropy(
            (h @ params["table"].T).flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        return nll, torch.tensor(batch["tokens"].numel())

    good = {"tokens": torch.tensor([[0, 6]]), "targets": torch.tensor([[3, 6]])}
    step = ff.compile_step(
        loss,
        ff.sgd(0.1),
        template=template,
        mesh=ff.Mesh(tp=2),
        layout=ff.Layout(compute={"vocab": "tp"}),
        batch=good,
        device="cpu",
    )
    state = step.init(0)
    step.simulate(state, good)
    for bad in ({"tokens": torch.tensor([[0, VOCAB]])}, {"targets": torch.tensor([[VOCAB + 2, 1]])}):
        with pytest.raises(NonFiniteError, match="a token of another vocabulary"):
            step.simulate(state, {**good, **bad})
