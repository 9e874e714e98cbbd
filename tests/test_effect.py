"""What of a layout acts on nothing is an error that names the nearest, unless it is said to be meant."""

from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.errors import LayoutError

OWN = {"w": ff.Param("inp out", (4, 8)), "v": ff.Param("out inp", (8, 4))}
DP = ff.Mesh(dp=2)
NAMED = {"w": ff.Param("embed mlp", (4, 8)), "v": ff.Param("mlp embed", (8, 4))}


def loss(p: Any, x: torch.Tensor) -> Any:
    return (x @ p["w"] @ p["v"]).pow(2).sum(), torch.tensor(x.shape[0])


def compiled(layout: ff.Layout, mesh: ff.Mesh, template: Any = NAMED, dims: str = "batch embed") -> ff.Compiled:
    return ff.compile(
        ff.value_and_grad(loss), template=template, mesh=mesh, layout=layout, batch=torch.ones(4, 4), batch_dims=dims
    )


@pytest.mark.parametrize(
    ("layout", "mesh", "template", "dims", "words"),
    [
        (layouts.fsdp("dp"), DP, OWN, "batch inp", ["store.params splits embed, latent over 'dp'", "inp, out"]),
        (layouts.zero1("dp"), DP, OWN, "batch inp", ["store.opt splits"]),
        (layouts.tp("tp"), ff.Mesh(tp=2), OWN, "batch inp", ["compute splits heads, kv_heads, mlp, vocab over 'tp'"]),
        (
            layouts.ddp("dp"), DP, NAMED, "bacth embed",
            ["compute splits batch over 'dp'", "'batch' in the place of 'bacth'"],
        ),
        (
            layouts.ddp("dp"), ff.Mesh(dp=2, tp=2), NAMED, "batch embed",
            ["no row of the layout names the axis 'tp'", "unused_ok=('tp',)"],
        ),
        (ff.Layout(), DP, NAMED, "batch embed", ["2 ranks would all compute the same"]),
        (
            layouts.ddp("dp") | ff.Layout(overrides={"*['x']": ff.Layout()}), DP, NAMED, "batch embed",
            ["no path of a parameter matches", "['v']"],
        ),
    ],
)  # fmt: skip
def test_what_hits_nothing_is_an_error(
    layout: ff.Layout, mesh: ff.Mesh, template: Any, dims: str, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        compiled(layout, mesh, template, dims)
    for word in (*words, "got:", "problem:", "rule:", "fix:"):
        assert word in str(caught.value), f"{word!r} is not in\n{caught.value}"


@pytest.mark.parametrize(
    ("layout", "mesh", "template", "dims"),
    [
        (layouts.single(), ff.Mesh(dp=2), NAMED, "batch embed"),
        (layouts.ddp("dp") | ff.Layout(unused_ok=("tp",)), ff.Mesh(dp=2, tp=2), NAMED, "batch embed"),
        (layouts.fsdp("dp") | ff.Layout(unused_ok=("embed",)), ff.Mesh(dp=2), OWN, "batch inp"),
        (layouts.fsdp("dp") | layouts.tp("tp"), ff.Mesh(dp=1, tp=1), OWN, "_ inp"),
        (layouts.tp("tp"), ff.Mesh(tp=2), NAMED, "_ embed"),
    ],
)
def test_what_is_meant_is_let_through(layout: ff.Layout, mesh: ff.Mesh, template: Any, dims: str) -> None:
    compiled(layout, mesh, template, dims)


def test_an_axis_of_per_rank_code_alone_is_used() -> None:
    mesh = ff.Mesh(dp=2, tp=2)
    region = ff.shard_map(lambda x: x * 2, mesh=mesh, in_specs=ff.P(("dp", "tp")), out_specs=ff.P(("dp", "tp")))

    def doubled(p: Any, x: torch.Tensor) -> torch.Tensor:
        return region(x @ p["w"])

    ff.compile(
        doubled, template=NAMED, mesh=mesh, layout=layouts.ddp("dp"), batch=torch.ones(4, 4), batch_dims="batch embed"
    )


@pytest.mark.parametrize(
    ("name", "ok"),
    [("embd", False), ("embedd", False), ("embed2", True), ("hidden", True), ("kv_head", True), ("embed", True)],
)
def test_a_misspelt_dim_of_one_leaf(name, ok):
    template = {"a": ff.Param("embed mlp", (4, 4)), "b": ff.Param(f"{name} _", (4, 4))}

    def compiled(layout):
        return ff.compile(
            lambda p, x: x @ (p["a"] + p["b"].t()), template=template, mesh=ff.Mesh(dp=2), layout=layout,
            batch=torch.ones(4, 4), batch_dims="batch _",
        )  # fmt: skip

    if ok:
        compiled(layouts.fsdp("dp"))
        return
    with pytest.raises(LayoutError, match=f"{name}.* of params..b") as e:
        compiled(layouts.fsdp("dp"))
    assert "'embed' in its place" in str(e.value)
    compiled(layouts.fsdp("dp") | ff.Layout(unused_ok=(name,)))
