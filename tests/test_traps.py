"""Faults that released frameworks shipped, each as the smallest case of its kind.

| kind of fault                                              | what shows that it can't happen here                    |
|------------------------------------------------------------|---------------------------------------------------------|
| a mean of per-rank means                                   | test_tokens_weigh_equally                               |
| a count divided by an axis size                            | test_the_count_is_a_sum                                 |
| ZeRO stages that differ under accumulation                 | test_stages_are_storage_only                            |
| a replicated weight used on split data owes a sum          | test_a_weight_used_on_split_data_gets_its_sum           |
| a gradient taken inside a manual region                    | test_a_gradient_inside_a_region_is_the_one_outside      |
| a resharding that drops or adds a sum                      | laws/test_reshard.py, every pair of types               |
| a nonlinear function of a pending sum                      | test_what_is_not_linear_takes_no_pending_sum            |
| a view of a split dim that does not divide                 | test_a_view_is_right_or_refused_by_name                 |
| parts of the wrong size                                    | test_parts_of_the_wrong_size_are_refused                |
| fewer kv heads than tensor-parallel ranks                  | test_fewer_kv_heads_than_ranks_are_one_device           |
| initial values that depend on the layout                   | test_initial_values_are_those_of_the_whole              |
| replicas that start or drift apart                         | test_replicas_hold_the_same_bits                        |
| a reduction in another precision than asked for            | passes/test_programs.py, every reduction is wide        |
| a process group for each layer                             | test_groups_do_not_grow_with_layers                     |
| an operator without a rule fails far from its cause        | test_an_operator_without_a_rule_is_named_with_its_line  |
| compile time grows with depth or axes                      | test_functions_do_not_grow_with_depth_or_axes           |
| HSDP all-reduces every microbatch                          | passes/test_programs.py, HSDP reduces once              |
| a norm counts leaves once a rank, or not at all            | test_the_norm_counts_each_element_once                  |
| a tied weight becomes two                                  | test_a_tied_weight_is_one                               |
| a scalar is added to a pending sum once a rank             | test_a_scalar_is_added_once                             |
| gradients averaged over ranks a second time                | laws/test_planted.py, with SGD and under Adam           |
| split tokens, whole weights, a gradient taken as complete  | test_a_router_on_split_tokens_gets_its_sum              |
| a trial forward counts in the statistics                   | test_statistics_count_every_token_once                  |
| hidden position tables                                     | test_positions_are_arguments                            |
| a combination that nobody guards                           | laws/test_layouts.py, every composition                 |
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fx_feather as ff
import layouts
from fx_feather import testing, tree
from fx_feather.errors import FeatherError, RuleError, ShapeError
from fx_feather.models import llama
from fx_feather.optim import global_norm
from fx_feather.param import initial_values
from fx_feather.spec import Type, assemble, shard, slices

ADAMW = ff.chain(ff.clip_by_global_norm(0.3), ff.adamw(lr=1e-2))
DATA = [layouts.ddp, layouts.zero1, layouts.zero2, layouts.fsdp]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# A linear model with a mask: the smallest that has counts.
LINEAR = {"w": ff.Param("embed", (5,)), "scale": ff.Param("_", (1,))}
DIMS = {"x": "batch seq embed", "y": "batch seq", "valid": "batch seq"}


def squares(p: Any, b: Any) -> tuple[Tensor, Tensor]:
    error = (b["x"] @ p["w"]) * p["scale"] - b["y"]
    return torch.where(b["valid"], error * error, 0.0).sum(), b["valid"].sum()


def rows(*valid: int) -> dict[str, Tensor]:
    """A batch of rows of eight tokens, of which so many are valid."""
    n = len(valid)
    mask = torch.arange(8).expand(n, 8) < torch.tensor(valid)[:, None]
    return {"x": random(n, 8, 5), "y": random(n, 8, seed=1), "valid": mask}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", [layouts.ddp, layouts.fsdp])
def test_tokens_weigh_equally(layout: Any, accumulate: int) -> None:
    """One valid token on rank 0, seven on rank 1; with two microbatches, the second has none at all."""
    testing.assert_equivalent(
        squares,
        template=LINEAR,
        batch=rows(1, 0, 7, 0),
        batch_dims=DIMS,
        mesh=ff.Mesh(dp=2),
        layout=layout("dp"),
        optimizer=ff.sgd(lr=0.1),
        accumulate=accumulate,
    )


def test_the_count_is_a_sum() -> None:
    f = ff.compile(
        ff.value_and_grad(squares),
        template=LINEAR,
        batch=(b := tree.map(lambda x: x.float() if x.is_floating_point() else x, rows(7, 0))),
        batch_dims=DIMS,
        mesh=ff.Mesh(dp=2),
        layout=layouts.ddp("dp"),
    )
    assert f.simulate(ff.init(LINEAR), b)[0]["count"] == 7


@pytest.mark.parametrize(("layout", "accumulate"), list(itertools.product(DATA, [1, 3])))
def test_stages_are_storage_only(layout: Any, accumulate: int) -> None:
    testing.assert_equivalent(
        squares,
        template=LINEAR,
        batch=rows(1, 5, 0, 8, 3, 7),
        batch_dims=DIMS,
        mesh=ff.Mesh(dp=2),
        layout=layout("dp"),
        optimizer=ff.adamw(lr=1e-2),
        steps=5,
        accumulate=accumulate,
        rtol=1e-12,
    )


def scaled(p: Any, b: Any) -> tuple[Tensor, Tensor]:
    """A norm's scale on a split sequence, then a scale on split heads."""
    x = ff.constrain(b, "batch seq embed") * p["norm"]
    heads = ff.constrain(torch.einsum("bse,ehd->bshd", x, p["q"]), "batch seq heads head_dim") * p["head_norm"]
    return heads.sin().sum(), torch.tensor(b.shape[0])


@pytest.mark.parametrize("row", ["seq", "heads"])
def test_a_weight_used_on_split_data_gets_its_sum(row: str) -> None:
    template = {
        "norm": ff.Param("embed", (3,)),
        "q": ff.Param("embed heads head_dim", (3, 4, 2)),
        "head_norm": ff.Param("head_dim", (2,)),
    }
    testing.assert_equivalent(
        scaled,
        template=template,
        batch=random(2, 4, 3),
        batch_dims="batch seq embed",
        mesh=ff.Mesh(tp=2),
        layout=ff.Layout(compute={row: "tp"}),
    )


def test_a_gradient_inside_a_region_is_the_one_outside() -> None:
    mesh, w, x = ff.Mesh(dp=2), random(3), random(4, 3, seed=1)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return ff.psum((x @ w).sin().sum(), "dp")

    def inside(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(loss)(w, x)

    specs: Any = {"mesh": mesh, "in_specs": (ff.P(), ff.P("dp")), "out_specs": ff.P()}
    true = torch.func.grad(lambda w: (x @ w).sin().sum())(w)
    outside = w.clone().requires_grad_()
    ff.shard_map(loss, **specs)(outside, x).backward()
    assert outside.grad is not None
    torch.testing.assert_close(outside.grad, true, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ff.shard_map(inside, **specs)(w, x), true, rtol=1e-12, atol=1e-12)


NONLINEAR = {
    "norm": lambda x: x.norm(dim=-1),
    "abs": torch.abs,
    "relu": torch.relu,
    "max": lambda x: x.amax(-1),
    "square": lambda x: x * x,
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (x.shape[-1],)),
}
LINEAR_IN = {
    "x.sum() + 10": lambda x: x.sum() + 10,
    "10 - x.sum()": lambda x: 10 - x.sum(),
    "x.sum() * 2": lambda x: x.sum() * 2,
    "x + 1": lambda x: x + 1.0,
    "x / 2 - 3": lambda x: x / 2 - 3.0,
}


def of_a_pending_sum(fn: Any, ranks: int) -> None:
    """Holds a function to one device where its argument is a product over a split dim, alone and summed."""
    settings: dict[str, Any] = {
        "template": {"w": ff.Param("mlp embed", (6, 4))},
        "batch": random(3, 6),
        "batch_dims": "batch mlp",
        "mesh": ff.Mesh(tp=ranks),
        "layout": layouts.tp("tp"),
    }
    testing.assert_equivalent(lambda p, b: {"out": fn(b @ p["w"])}, **settings)
    testing.assert_equivalent(lambda p, b: (fn(b @ p["w"]).sin().sum(), torch.tensor(3)), **settings)


@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_takes_no_pending_sum(name: str) -> None:
    of_a_pending_sum(NONLINEAR[name], 2)


@pytest.mark.parametrize("name", LINEAR_IN)
def test_a_scalar_is_added_once(name: str) -> None:
    of_a_pending_sum(LINEAR_IN[name], 3)


@pytest.mark.parametrize(
    ("shape", "row", "view", "refused"),
    [
        ((4, 6), "mlp", (24,), True),
        ((8, 6), "batch", (48,), False),
        ((12, 8), "mlp", (16, 6), True),
        ((12, 8), "batch", (16, 6), False),
        ((12, 8), "mlp", (12, 2, 4), False),
    ],
)
def test_a_view_is_right_or_refused_by_name(shape: Any, row: str, view: Any, refused: bool) -> None:
    settings: dict[str, Any] = {
        "template": {"w": ff.Param("_", (1,))},
        "batch": random(*shape),
        "batch_dims": "batch mlp",
        "mesh": ff.Mesh(a=2),
        "layout": ff.Layout(compute={row: "a"}),
    }

    def fn(p: Any, b: Tensor) -> Tensor:
        return b.reshape(view) * p["w"]

    if not refused:
        testing.assert_equivalent(fn, **settings)
        return
    with pytest.raises(FeatherError) as caught:
        testing.assert_equivalent(fn, **settings)
    text = str(caught.value)
    assert "aten." in text and "test_traps.py" in text and f"{shape[1]}@a" in text, text


def test_a_dim_that_does_not_divide_is_refused_with_its_sizes() -> None:
    with pytest.raises(ShapeError, match="size 6, axis 'a' has size 4"):
        testing.assert_equivalent(
            lambda p, b: b.reshape(-1) * p["w"],
            template={"w": ff.Param("_", (1,))},
            batch=random(6, 2),
            batch_dims="batch _",
            mesh=ff.Mesh(a=4),
            layout=ff.Layout(compute={"batch": "a"}),
        )


def test_parts_of_the_wrong_size_are_refused() -> None:
    t = Type(torch.float64, (4,), (("a",),))
    with pytest.raises(ShapeError, match=r"rank 0 holds \[3\]; rank 1 holds \[1\]"):
        assemble([random(3), random(1)], t, ff.Mesh(a=2))


@pytest.mark.parametrize(
    ("kv_heads", "mesh", "layout"),
    [
        (2, ff.Mesh(tp=4), layouts.tp("tp")),
        (2, ff.Mesh(tp=4), layouts.tp_sp("tp")),
        (1, ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
        (2, ff.Mesh(a=2, b=2), layouts.tp(("a", "b"))),
    ],
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fewer_kv_heads_than_ranks_are_one_device(
    kv_heads: int, mesh: ff.Mesh, layout: ff.Layout, qk_norm: bool
) -> None:
    cfg = llama.LlamaConfig(
        vocab=8, layers=1, embed=8, heads=4, kv_heads=kv_heads, mlp=8, qk_norm=qk_norm, dtype=torch.float64
    )
    tokens = torch.arange(16).view(4, 4) % 8
    testing.assert_equivalent(
        llama.loss(cfg),
        template=llama.template(cfg),
        batch={"tokens": tokens, "targets": tokens.roll(1, 1), "positions": torch.arange(4).expand(4, 4)},
        mesh=mesh,
        layout=layout,
        optimizer=ff.adamw(lr=1e-2),
    )


def test_kv_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    cfg = llama.LlamaConfig(vocab=8, layers=1, embed=12, heads=6, kv_heads=3, mlp=8)
    with pytest.raises(ShapeError, match=r"\(kv_heads\) has size 3, axis 'tp' has size 2"):
        testing.assert_equivalent(
            llama.loss(cfg),
            template=llama.template(cfg),
            batch=dict.fromkeys(("tokens", "targets", "positions"), torch.zeros(2, 4, dtype=torch.int64)),
            mesh=ff.Mesh(tp=2),
            layout=layouts.tp("tp"),
        )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_initial_values_are_those_of_the_whole(size: int) -> None:
    mesh = ff.Mesh(a=max(size // 2, 1), b=min(size, 2))
    template = [ff.Param("embed mlp", (7, 8)) for _ in range(3)]
    whole = ff.init(template)
    assert len({tuple(row.tolist()) for w in whole for row in w}) == 21, "two rows hold the same values"
    for layout in testing.compositions(mesh).values():
        for w, p, path in zip(whole, template, tree.paths(template), strict=True):
            t = layout.param_types(p.dim_names, p.shape, p.dtype).store
            for r in range(mesh.size):
                part = initial_values(p, path, 0, slices(t, mesh, r))
                assert torch.equal(part, w[slices(t, mesh, r)])


def test_replicas_hold_the_same_bits() -> None:
    """Every rank's own parameters and state, from the start on and after three steps."""
    mesh, batch = ff.Mesh(r=2, dp=2), rows(1, 5, 0, 8)
    step = ff.compile_step(
        squares,
        ADAMW,
        template=(template := tree.map(lambda p: ff.Param(p.dims, p.shape, dtype=torch.float64), LINEAR)),
        mesh=mesh,
        layout=layouts.hsdp("r", "dp"),
        batch=batch,
        batch_dims=DIMS,
    )
    sections, run, n = step.program.sections, step.simulator().run, len(step.params.types)
    (data,) = step.sim_microbatches(batch, "test")
    params = step.scatter(tree.leaves(ff.init(template)), step.params.at_rest())
    state = run(sections["init"], params)
    for _ in range(3):
        reduced = step._advance.reduced(params, [data], step.simulator())
        resting, updates = [*state, *params], step._advance.updates
        _, _, numbers, *checked = run(sections["check"], [*reduced[: n + 2], *(resting[i] for i in updates.early)])
        assert all(torch.equal(x, numbers[0]) for x in numbers)
        new = run(sections["update"], [*checked, *resting])
        params, state = new[:n], new[n:]
        for values in new:
            for ranks in mesh.groups("r"):
                assert all(torch.equal(values[r], values[ranks[0]]) for r in ranks)


def compiled(layers: int, mesh: ff.Mesh, layout: ff.Layout) -> ff.Step:
    cfg = llama.LlamaConfig(vocab=16, layers=layers, embed=8, heads=2, kv_heads=2, mlp=8)
    batch = {name: torch.zeros(8, 4, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
    template = llama.template(cfg)
    return ff.compile_step(llama.loss(cfg), ff.sgd(lr=0.1), template=template, mesh=mesh, layout=layout, batch=batch)


MANY = ff.Mesh(r=2, dp=2, tp=2)
ALL = layouts.hsdp("r", "dp") | layouts.tp_sp("tp")


@pytest.fixture(scope="module")
def deep() -> ff.Step:
    return compiled(9, MANY, ALL)


def test_groups_do_not_grow_with_layers(deep: ff.Step) -> None:
    groups = {c.axes for c in deep.collectives()}
    assert groups <= {("r",), ("dp",), ("tp",), ("dp", "tp"), ("r", "dp"), ("r", "tp"), ("r", "dp", "tp")}
    assert groups == {c.axes for c in compiled(2, MANY, ALL).collectives()}


def test_functions_do_not_grow_with_depth_or_axes(deep: ff.Step) -> None:
    """Each distinct block is traced once; what is traced is all that compile time can grow with."""

    def functions(step: ff.Step) -> int:
        return len({i.func for i in step.program.sections["first"].instrs})

    def nodes(step: ff.Step) -> int:
        return max(len(f.graph.nodes) for f in step.program.funcs())

    shallow, flat = compiled(2, MANY, ALL), compiled(2, ff.Mesh(dp=2), layouts.fsdp("dp"))
    assert functions(deep) == functions(shallow)
    assert functions(shallow) <= functions(flat) + 8
    assert nodes(shallow) <= 2 * nodes(flat)


@torch.library.custom_op("fx_feather_traps::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    """An operator that nobody gave a rule."""
    return x.flip(0)


unknown.register_fake(torch.empty_like)


def test_an_operator_without_a_rule_is_named_with_its_line() -> None:
    with pytest.raises(RuleError) as caught:
        ff.compile(
            lambda p, b: unknown(b) + p["w"],
            template={"w": ff.Param("_", (1,))},
            batch=random(4, 2).float(),
            batch_dims="batch _",
            mesh=ff.Mesh(dp=2),
            layout=layouts.ddp("dp"),
        )
    text = str(caught.value)
    for part in ("fx_feather_traps::unknown", "test_traps.py", "unknown(b)", "f32[4@dp, 2]", "Mesh(dp=2)", "ff.rule("):
        assert part in text, text


def by_largest(max_norm: float) -> ff.Transform:
    """Clipping by the largest absolute value of any gradient."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        factor = max_norm / global_norm(grads, math.inf)
        return tree.map(lambda g: g * factor, grads), state

    return ff.Transform(lambda params: (), update, "by_largest")


@pytest.mark.parametrize("clip", [ff.clip_by_global_norm(0.01), by_largest(0.01)], ids=["two", "largest"])
@pytest.mark.parametrize("layout", [layouts.zero1, layouts.fsdp])
def test_the_norm_counts_each_element_once(layout: Any, clip: ff.Transform) -> None:
    """`w` is split in unequal parts and `scale` is replicated."""
    testing.assert_equivalent(
        squares,
        template=LINEAR,
        batch=rows(1, 5, 0, 8),
        batch_dims=DIMS,
        mesh=ff.Mesh(dp=4),
        layout=layout("dp"),
        optimizer=ff.chain(clip, ff.sgd(lr=1.0)),
    )


def test_a_tied_weight_is_one() -> None:
    cfg = llama.LlamaConfig(vocab=7, layers=1, embed=5, heads=2, kv_heads=2, head_dim=2, mlp=4, tied=True)
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 7, (2, 4, 4), generator=g)
    testing.assert_equivalent(
        llama.loss(cfg),
        template=llama.template(cfg),
        batch={"tokens": tokens, "targets": targets, "positions": torch.arange(4).expand(4, 4).contiguous()},
        mesh=ff.Mesh(dp=2, tp=2),
        layout=layouts.fsdp("dp") | layouts.tp("tp"),
        optimizer=ADAMW,
        steps=5,
    )


def routed(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens split over the axis that splits the weights; the router's weight and the norm's are whole."""
    x = ff.constrain(x, "batch residual_seq embed")
    h = torch.nn.functional.rms_norm(x, (3,), p["norm"], 1e-5)
    gate = torch.softmax(h @ p["router"], -1)
    up = ff.constrain(h, "batch seq embed") @ p["up"]
    out = ff.constrain(up.sin() @ p["down"], "batch residual_seq embed")
    return ((x + out) * gate[..., :1]).sin().sum(), torch.tensor(x.shape[0])


def test_a_router_on_split_tokens_gets_its_sum() -> None:
    template = {
        "norm": ff.Param("embed", (3,)),
        "router": ff.Param("embed _", (3, 2)),
        "up": ff.Param("embed mlp", (3, 4)),
        "down": ff.Param("mlp embed", (4, 3)),
    }
    testing.assert_equivalent(
        routed,
        template=template,
        batch=random(2, 4, 3),
        batch_dims="batch residual_seq embed",
        mesh=ff.Mesh(dp=2, tp=2),
        layout=layouts.fsdp("dp") | layouts.tp_sp("tp"),
        optimizer=ff.sgd(lr=0.1),
    )


def test_statistics_count_every_token_once() -> None:
    """How many tokens chose each of three experts, two a token, over microbatches and ranks."""
    rows_, seq, top_k = 4, 6, 2

    def loss(p: Any, x: Tensor) -> Any:
        scores = x @ p["router"]
        chosen = scores.topk(top_k, -1).indices
        counts = torch.stack([(chosen == e).sum() for e in range(3)])
        return scores.sin().sum(), torch.tensor(x.shape[0]), {"tokens": counts}

    step = ff.compile_step(
        loss,
        ff.sgd(lr=0.1),
        template={"router": ff.Param("embed _", (5, 3))},
        batch=(x := random(rows_, seq, 5).float()),
        batch_dims="batch seq embed",
        mesh=ff.Mesh(dp=2),
        layout=layouts.ddp("dp"),
        accumulate=2,
    )
    _, metrics = step.simulate(step.init(0), x)
    assert metrics["aux"]["tokens"].sum() == rows_ * seq * top_k


def test_positions_are_arguments() -> None:
    """Positions split over an axis beside data parallelism; so are those of a table that is closed over."""
    settings: dict[str, Any] = {
        "template": {"w": ff.Param("embed", (3,))},
        "batch": {"x": random(2, 4, 3), "positions": torch.arange(4.0).expand(2, 4).contiguous()},
        "batch_dims": {"x": "batch seq embed", "positions": "batch seq"},
        "mesh": ff.Mesh(dp=2, cp=2),
        "layout": ff.Layout(compute={"batch": "dp", "seq": "cp"}),
    }

    def turned(p: Any, b: Any) -> Any:
        angles = b["positions"][..., None] * p["w"]
        return (b["x"] * angles.sin()).sum(), torch.tensor(b["x"].shape[0])

    testing.assert_equivalent(turned, **settings)
    hidden = torch.arange(4.0)

    def closed(p: Any, b: Any) -> Any:
        turn = ff.block(lambda x: x * hidden.to(x.dtype)[:, None], name="turn")
        return (turn(b["x"]) * p["w"]).sum(), torch.tensor(2)

    testing.assert_equivalent(closed, **settings)


def test_shards_are_cut_as_they_are_joined() -> None:
    t, mesh, x = Type(torch.float64, (5, 3), (("a",), ("b",))), ff.Mesh(a=2, b=2), random(5, 3)
    assert torch.equal(assemble([shard(x, t, mesh, r) for r in range(4)], t, mesh), x)


def test_every_kind_of_fault_is_in_the_table() -> None:
    """Each test that the table names is there, and each test here is named or checks a helper."""
    here = {name for name in globals() if name.startswith("test_")}
    rows_ = [line.split("|")[2].strip() for line in (__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert len(rows_) == 25
    assert {r for r in rows_ if r.startswith("test_")} <= here
