"""Random numbers in models and optimizers: those of the plain function on one device, in every layout."""

import pytest
import torch
import torch.nn.functional as F

import fx_feather as ff
import layouts
from fx_feather.testing import assert_equivalent

LAYOUTS = {
    "single": (ff.Mesh(dp=1), layouts.single()),
    "ddp": (ff.Mesh(dp=2), layouts.ddp("dp")),
    "fsdp": (ff.Mesh(dp=4), layouts.fsdp("dp")),
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "tp on 3": (ff.Mesh(tp=3), layouts.tp("tp")),
    "fsdp and tp_sp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp")),
}
X = torch.randn(8, 6, 12, generator=torch.Generator().manual_seed(0))
TEMPLATE = {
    "qkv": ff.Param("embed heads", (12, 12)),
    "out": ff.Param("heads embed", (12, 12)),
    "head": ff.Param("embed vocab", (12, 7)),
    "scale": ff.Param("embed", (12,)),
}


TENSORS = ff.init(TEMPLATE)


def attention(x, p):
    q = (ff.constrain(x, "batch seq embed") @ p["qkv"]).unflatten(-1, (6, 2)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3, is_causal=True)
    return F.dropout(mixed.transpose(1, 2).flatten(2) @ p["out"], 0.1)


layer = ff.block(lambda x, p: ff.constrain(x + attention(x, p), "batch residual_seq embed"), name="layer")


def loss(p, x):
    for _ in range(2):
        x = layer(x, p)
    x = ff.constrain(x, "batch seq embed")
    x = x * torch.bernoulli(torch.sigmoid(x.detach())) + 0.1 * torch.randn_like(x)
    y = F.alpha_dropout(F.dropout1d(F.dropout(x @ p["head"], 0.25), 0.2), 0.1, True)
    # A draw of a parameter's shape is one for the whole batch.
    return (torch.log_softmax(y, -1) ** 2).sum() + (x * F.dropout(p["scale"], 0.5)).sum(), torch.tensor(x.shape[0])


def noisy():
    """Gradient noise, with a state that holds draws and a key of its own."""

    def init(params):
        return {"mu": ff.tree.map(torch.rand_like, params), "key": ff.random.key(3)}

    leaf = ff.block(lambda g, m: -0.1 * g + 0.01 * torch.randn_like(g) * m, name="noisy")

    def update(grads, state, params):
        key, own = ff.random.split(state["key"]).unbind()
        updates = ff.tree.map(lambda g, m: leaf(g, m) + 0.01 * ff.random.normal(own, g), grads, state["mu"])
        mu = ff.tree.map(lambda m: m / 2 + torch.rand_like(m), state["mu"])
        return updates, {"mu": mu, "key": key}

    return ff.Transform(init, update)


settings = {"template": TEMPLATE, "batch": X, "batch_dims": "batch seq embed", "seed": 5}


@pytest.mark.parametrize("name", LAYOUTS)
def test_draws_are_those_of_one_device(name):
    mesh, layout = LAYOUTS[name]
    how = {"optimizer": noisy(), "steps": 2} if "tp" in name else {}
    assert_equivalent(loss, mesh=mesh, layout=layout, accumulate=2, **how, **settings)


def test_draws_without_accumulation_are_those_of_one_device():
    mesh, layout = LAYOUTS["fsdp and tp_sp"]
    assert_equivalent(loss, mesh=mesh, layout=layout, **settings)


MASK = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.7
MASK.fill_diagonal_(True)


@pytest.mark.parametrize(
    "how",
    [
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": MASK},
        {"attn_mask": MASK.double()},
        {"enable_gqa": True},
    ],
    ids=["causal and scale", "mask", "added mask", "grouped heads"],
)
def test_attention_drops_the_same_weights(how):
    def loss(p, x):
        q = ff.constrain((x @ p["qkv"]).unflatten(-1, (6, 2)).transpose(1, 2), "batch heads seq _")
        k = ff.constrain(q.unflatten(1, (2, 3))[:, :, 0] if "enable_gqa" in how else q, "batch heads seq _")
        given = {n: torch.tensor(v.tolist(), dtype=v.dtype) if n == "attn_mask" else v for n, v in how.items()}
        out = F.scaled_dot_product_attention(q, k, k, dropout_p=0.4, **given)
        return (out**2).sum(), torch.tensor(x.shape[0])

    mesh, layout = ff.Mesh(dp=2, tp=2), layouts.ddp("dp") | layouts.tp("tp")
    assert_equivalent(loss, mesh=mesh, layout=layout, accumulate=2, **settings)


@pytest.mark.parametrize("remat", ["full", 3000])
def test_what_is_computed_again_is_drawn_again(remat):
    mesh, layout = LAYOUTS["fsdp and tp_sp"]
    assert_equivalent(loss, mesh=mesh, layout=layout, remat=remat, accumulate=2, **settings)


def compiled(fn, mesh=None, layout=None, batch=X, dims="batch seq embed", template=TEMPLATE, **more):
    mesh = mesh or ff.Mesh(dp=1)
    layout = layout or layouts.single()
    return ff.compile(fn, template=template, mesh=mesh, layout=layout, batch=batch, batch_dims=dims, **more)


def written(x):
    """Draws into parts of a value, one of which shares its memory by a view."""
    y = x * 2
    y[:, :, 0].normal_()
    y.unsqueeze(0)[..., 3:9].bernoulli_(0.5)
    return y


KINDS = {
    "parts of a value": written,
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5).squeeze(-1),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli of values": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x, 0.25),
    "rand": lambda x: x * torch.rand(x.shape),
    "randn": lambda x: x * torch.randn(6, 12, dtype=x.dtype),
    "randint": lambda x: x * torch.randint(2, 9, (12,)),
    "randperm": lambda x: x * torch.randperm(12),
    "normal of values": lambda x: torch.normal(x, x.abs()),
    "normal of numbers": lambda x: x * torch.normal(1.0, 2.0, (12,)),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 2),
    "bernoulli_": lambda x: torch.empty(x.shape).bernoulli_(0.3) * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "random_": lambda x: torch.empty_like(x).random_(),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "a module in place": lambda x: torch.nn.Dropout(0.5, inplace=True)(torch.relu(x)) + 1,
    "a key of one's own": lambda x: ff.random.dropout(ff.random.fold_in(ff.random.key(1), 2), x, 0.5),
    "a shape and a key": lambda x: x * ff.random.uniform(ff.random.key(1), (12,), 1.0, 2.0, dtype=x.dtype),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_draw_is_that_of_one_device(kind):
    draw = KINDS[kind]
    mesh, layout = ff.Mesh(dp=2, tp=3), layouts.ddp("dp") | ff.Layout(compute={"seq": "tp"})
    f = compiled(lambda p, x: (draw(x), draw(x)), mesh, layout, seed=5)
    with ff.random.seeded(5, 3):
        want = draw(X), draw(X)
    got = f.simulate(TENSORS, X, step=3)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    own_key = "key" in kind
    assert torch.equal(*want) == own_key
    assert torch.equal(f.simulate(TENSORS, X, step=4)[0], want[0]) == own_key


def test_draws_differ_by_call_site_call_step_seed_and_row():
    draw = ff.block(lambda x: (torch.rand_like(x), torch.rand_like(x)), name="draw")
    f = [compiled(lambda p, x: (*draw(x), *draw(x), torch.rand_like(x)), seed=s) for s in (0, 1)]
    drawn = [x for g in f for step in (0, 1) for x in g.simulate(TENSORS, X, step=step)]
    rows = torch.cat([x.flatten(1) for x in drawn])
    assert len(rows.unique(dim=0)) == len(rows) == 20 * 8
    assert len(rows.unique()) > 0.999 * rows.numel()


def test_only_draws_that_are_made_are_numbered():
    """What doesn't draw, or is not called, has no part in the numbers of what does."""
    quiet = ff.block(lambda x: F.dropout(x, 0.5, training=False), name="quiet")
    loud = ff.block(lambda x: F.dropout(x, 0.0) + torch.rand_like(x), name="loud")

    def fn(p, x):
        torch.rand_like(x)  # counts, though nobody reads it
        return loud(quiet(quiet(x))) + F.dropout(x, 0.0) + torch.rand_like(x)

    with ff.random.seeded(0):
        want = fn(None, X)
    assert torch.equal(compiled(fn, seed=0).simulate(TENSORS, X), want)


@pytest.mark.parametrize(
    ("fn", "part"),
    [
        (lambda x: F.dropout(x, 0.5), (2, 6, 12)),
        (lambda x: x * torch.rand(x.shape), (2, 6, 12)),
        (lambda x: ff.constrain(torch.rand(8, 12), "batch embed"), (2, 12)),
        (lambda x: x * torch.rand(12), (12,)),
        (lambda x: x + (rand := torch.rand(8, 1, 1)) * rand.sum(), (8, 1, 1)),
    ],
    ids=["dropout", "a shape", "named", "shared by all rows", "used whole too"],
)
def test_a_rank_draws_no_more_than_its_part(fn, part):
    f = compiled(lambda p, x: fn(x), ff.Mesh(dp=4), layouts.ddp("dp"), seed=0)
    (shape,) = [n.meta["val"].shape for g in f.program.funcs() for n in g.graph.nodes if "draw" in str(n.target)]
    assert shape == part
    with ff.random.seeded(0):
        assert torch.allclose(f.simulate(TENSORS, X), fn(X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.dropout(x[:0], 0.5),
    ],
    ids=["attention", "no elements"],
)
def test_what_draws_nothing_needs_no_seed(fn):
    f = compiled(lambda p, x: fn(x))
    assert not any(f.drawn.values())
    with ff.random.seeded(0):
        assert torch.allclose(f.simulate(TENSORS, X), fn(X))


def test_a_seed_is_part_of_what_ranks_compare():
    prints = [compiled(lambda p, x: F.dropout(x, 0.5), seed=s).program.fingerprint() for s in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]
    quiet = [compiled(lambda p, x: x * 2, seed=s).program.fingerprint() for s in (0, 1)]
    assert quiet[0] == quiet[1]


def test_what_is_compiled_under_seeded_has_keys_of_its_own():
    loud = ff.block(lambda x: F.dropout(x, 0.5), name="loud")
    plain = compiled(lambda p, x: loud(F.dropout(x, 0.5)), seed=0)
    with ff.random.seeded(1):
        inside = compiled(lambda p, x: loud(F.dropout(x, 0.5)), seed=0)
        assert inside.program.fingerprint() == plain.program.fingerprint()
        assert torch.equal(inside.simulate(TENSORS, X), plain.simulate(TENSORS, X))


def test_masks_are_those_of_one_device_in_a_narrow_dtype():
    mesh, layout = ff.Mesh(dp=2), layouts.fsdp("dp") | layouts.mixed()
    f = compiled(lambda p, x: F.dropout(x @ p["qkv"].to(x.dtype), 0.5), mesh, layout, seed=0)
    with ff.random.seeded(0):
        want = F.dropout(torch.ones(8, 6, 12), 0.5)
    assert torch.equal(f.simulate(TENSORS, X) == 0, want == 0)


def test_a_function_without_a_seed_says_where_it_draws():
    with pytest.raises(ff.FeatherError, match=r"(?s)draws random numbers at .*test_random.py.*seed=0.*step=k"):
        compiled(lambda p, x: F.dropout(x, 0.5))
    compiled(lambda p, x: F.dropout(x, 0.5, training=False))
    compiled(lambda p, x: ff.random.dropout(ff.random.key(0), x, 0.5))


def step(fn, **more):
    return ff.compile_step(
        fn, ff.sgd(lr=0.1), mesh=ff.Mesh(dp=1), layout=layouts.single(), accumulate=2, **settings, **more
    )


def quadratic(y, x):
    return (y**2).sum(), torch.tensor(x.shape[0])


def test_a_draw_whose_rows_are_not_known_is_refused_under_accumulation():
    with pytest.raises(ff.FeatherError, match=r"(?s)draw of random numbers at .*test_random.py.*batch _ _"):
        step(lambda p, x: quadratic(x * p["scale"] * torch.rand(x.shape), x))


def test_a_batch_that_cannot_be_followed_is_refused_under_accumulation():
    whole = ff.shard_map(lambda x: x * 2, mesh=ff.Mesh(dp=1), in_specs=ff.P(), out_specs=ff.P())
    with pytest.raises(ff.FeatherError, match=r"(?s)accumulate=2.*draws.*shard_map.*can't be followed.*accumulate=1"):
        step(lambda p, x: quadratic(F.dropout(whole(x) * p["scale"], 0.5), x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y * ff.constrain(torch.rand(y.shape[0], 1, 1), "batch _ _"),
        lambda y: y * ff.constrain(torch.rand(12), "_"),
        lambda y: F.dropout(y.flatten(0, 1), 0.5),
        lambda y: F.dropout(y.transpose(0, 2), 0.5),
        lambda y: F.dropout(y, 0.5).sum(1) + F.dropout(y.detach().transpose(0, 1), 0.5).amax(0),
    ],
    ids=["named rows", "shared by all rows", "rows merged", "rows last", "used twice"],
)
def test_microbatches_draw_the_rows_of_the_batch_wherever_they_are(fn):
    def loss(p, x):
        return quadratic(fn(x * p["scale"]), x)

    assert_equivalent(loss, mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), accumulate=4, **settings)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda x: torch.rand(12, generator=torch.Generator()), r"torch.Generator.*ff.random.normal"),
        (lambda x: torch.empty(12).normal_(generator=torch.Generator()), r"torch.Generator.*seed="),
        (lambda x: F.dropout(x, 0.5, inplace=True), r"aten::copy_.*in place"),
        (lambda x: x.view(-1, 12)[0].normal_(), r"aten::copy_.*in place"),
        (lambda x: torch.poisson(x.abs()), r"how poisson draws is not known.*torch.rand"),
        (lambda x: torch.multinomial(torch.ones(12), 3)[0], r"how multinomial draws is not known"),
    ],
    ids=["generator", "generator of a method", "the batch", "a view of the batch", "poisson", "multinomial"],
)
def test_what_cannot_be_drawn_by_a_key_is_refused(draw, words):
    with pytest.raises(ff.FeatherError, match=f"(?s)test_random.py.*{words}"):
        compiled(lambda p, x: x * draw(x), seed=0)


def test_per_rank_code_draws_by_keys_alone():
    mesh = ff.Mesh(dp=2)
    spec = {"mesh": mesh, "in_specs": ff.P("dp"), "out_specs": ff.P("dp")}
    with pytest.raises(ff.FeatherError, match=r"(?s)bernoulli.*test_random.py.*ff.axis_index"):
        ff.shard_map(lambda x: F.dropout(x, 0.5), **spec)(X)

    def own(x):
        return x + ff.random.uniform(ff.random.fold_in(ff.random.key(0), ff.axis_index("dp")), x)

    drawn = ff.shard_map(own, **spec)(X) - X
    assert not torch.equal(drawn[:4], drawn[4:])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ff.random.key(0.5),
        lambda: ff.random.split(ff.random.key(0), 0),
        lambda: ff.random.fold_in(torch.tensor(0.5), 1),
        lambda: ff.random.normal(0, (3,)),
        lambda: ff.random.normal(ff.random.key(0), (3,), std=-1.0),
        lambda: ff.random.uniform(ff.random.key(0), (3,), 2.0, 1.0),
        lambda: ff.random.uniform(ff.random.key(0), (3,), dtype=torch.int64),
        lambda: ff.random.bernoulli(ff.random.key(0), 1.5, (3,)),
        lambda: ff.random.dropout(ff.random.split(ff.random.key(0)), X, 0.5),
        lambda: ff.compile_step(
            loss, ff.sgd(lr=1.0), mesh=ff.Mesh(dp=1), layout=layouts.single(), **settings | {"seed": "a"}
        ),
        lambda: ff.random.seeded(0, part="model").__enter__(),
    ],
)
def test_mistakes_are_told(call):
    with pytest.raises(ff.FeatherError, match=r"(?s)problem:.*fix:"):
        call()
