"""A sum of what several ranks hold alike is shared out among them, and stays what it is."""

import math
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.passes import parts
from fx_feather.spec import Type

MESHES = {
    "ddp": (ff.Mesh(dp=4), layouts.ddp("dp")),
    "hsdp": (ff.Mesh(r=2, s=2), layouts.hsdp("r", "s")),
    "ddp tp": (ff.Mesh(dp=2, tp=2), layouts.ddp("dp") | ff.Layout(compute={"mlp": "tp"})),
}


def compiled(mesh: ff.Mesh, layout: ff.Layout, optimizer: ff.Transform) -> ff.Step:
    """A step of a model whose leaves 4 ranks divide along the first dim, along the second, and not at all."""
    template = {
        "a": ff.Param("embed mlp", (8, 6), ff.normal(1.0), torch.float64),
        "b": ff.Param("mlp _", (6, 12), ff.normal(1.0), torch.float64),
        "c": ff.Param("_", (3,), ff.normal(1.0), torch.float64),
    }

    def loss(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ params["a"]).tanh() @ params["b"]
        return ((y.unflatten(-1, (4, 3)) * params["c"]) ** 2).sum(), torch.tensor(x.shape[0])

    settings: dict[str, Any] = {"template": template, "mesh": mesh, "layout": layout, "batch_dims": "batch embed"}
    return ff.compile_step(loss, optimizer, **settings, batch=torch.ones(8, 8, dtype=torch.float64), device="cpu")


def trained_as_on_one_device(mesh: ff.Mesh, layout: ff.Layout, optimizer: ff.Transform) -> None:
    step, alone = compiled(mesh, layout, optimizer), compiled(ff.Mesh(), ff.Layout(), optimizer)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = step.init(0), alone.init(0)
    for _ in range(3):
        one, got = step.simulate(one, x)
        other, want = alone.simulate(other, x)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-12)
    for key, value in other.params.items():
        torch.testing.assert_close(one.params[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("least", [1, 50, 1 << 15])
def test_the_norm_and_what_is_clipped_by_it_are_those_of_one_device(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WORTH_PARTS", least)
    trained_as_on_one_device(*MESHES[name], ff.chain(ff.clip_by_global_norm(0.5), ff.adamw(0.1)))


def test_each_rank_sums_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WORTH_PARTS", 1)
    step = compiled(*MESHES["ddp"], ff.chain(ff.clip_by_global_norm(0.5), ff.sgd(0.1)))
    check = step.program.sections["check"]
    cut = [n for i in check.instrs for n in i.func.graph.nodes if n.target is torch.ops.fx_feather.pscatter.default]
    assert [tuple(n.meta["val"].shape) for n in cut] == [(2, 6), (6, 3)]
    # One number more is sent, and the gradients themselves stay whole for the update.
    sent = [c for c in step.collectives() if c.operand_bytes <= 32]
    assert [c.name for c in sent] == ["psum", "psum"]
    assert math.isclose(sum(c.operand_bytes for c in step.collectives() if c not in sent), 8 * (48 + 72 + 3))


OTHERS = {
    "a second norm, of what the first has clipped": ff.chain(
        ff.clip_by_global_norm(1.0), ff.clip_by_global_norm(0.1), ff.sgd(0.1)
    ),
    "a norm after other transforms": ff.chain(ff.scale(2.0), ff.clip_by_global_norm(0.1), ff.adamw(0.1)),
    "no norm but the one that is reported": ff.sgd(0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_taken_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WORTH_PARTS", 1)
    trained_as_on_one_device(*MESHES["hsdp"], OTHERS[name])


def test_a_part_is_made_by_the_call_that_sums_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WORTH_PARTS", 1)
    step = compiled(*MESHES["ddp"], ff.clip_by_global_norm(0.5))
    calls = [(i.func.name, len(i.ins)) for i in step.program.sections["check"].instrs]
    assert calls.count(("part+sum_squares", 1)) == 2 and "part" not in dict(calls)


@pytest.mark.parametrize(
    ("t", "part"),
    [
        (Type(torch.float32, (8, 6), ((), ())), "f32[8@(a,b), 6]"),
        (Type(torch.float32, (6, 8), (("a",), ())), "f32[6@a, 8@b]"),
        (Type(torch.float32, (12, 5), (("a",), ()), replicated=frozenset({"b"})), "f32[12@(a,b), 5]"),
        (Type(torch.float32, (8, 6), ((), ()), partial=frozenset({"a"})), "f32[8@b, 6]{partial=a}"),
        (Type(torch.float32, (3, 5), ((), ())), "f32[3, 5]"),
        (Type(torch.float32, (7, 8), (("a",), ())), "f32[7@a, 8]"),
        (Type(torch.float32, (), ()), "f32[]"),
    ],
)
def test_a_part_is_split_where_it_is_the_same(t: Type, part: str) -> None:
    assert repr(parts._part(t, ff.Mesh(a=2, b=2, one=1))) == part
