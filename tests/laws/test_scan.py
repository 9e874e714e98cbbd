"""The law of scans: what a loop over the slices computes, value and every gradient, in any layout, chunk and remat."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fx_feather as ff
import layouts

F64 = torch.float64
TEMPLATE = {"w": ff.Param("embed mlp", (3, 3), dtype=F64, init=ff.normal(0.5)), "b": ff.Param("embed", (3,), dtype=F64)}
WHOLE_SEQ = {
    "single": lambda: (ff.Mesh(), layouts.single()),
    "ddp": lambda: (ff.Mesh(dp=2), layouts.ddp("dp")),
    "fsdp": lambda: (ff.Mesh(dp=2), layouts.fsdp("dp")),
    "both": lambda: (ff.Mesh(a=2, b=2), layouts.fsdp("a") | layouts.ddp("b")),
}
SPLIT_SEQ = {
    "seq": lambda k: (ff.Mesh(sp=k), ff.Layout(compute={"seq": "sp"})),
    "seq, fsdp": lambda k: (ff.Mesh(dp=2, sp=k), layouts.fsdp("dp") | ff.Layout(compute={"seq": "sp"})),
}


def cell(h: Any, x: Any, p: Any) -> tuple[Any, Any]:
    new = torch.tanh(x + h["h"] @ p["w"] + p["b"])
    return {"h": new, "n": h["n"] + 1}, (new, new.sum(-1))


def loss(run: Any, **options: Any) -> Any:
    def fn(p: Any, batch: Any) -> Any:
        first = {"h": batch["x"][:, 0] * 0.1, "n": torch.zeros((), dtype=F64)}
        last, (ys, sums) = run(cell, first, batch["x"], p, dim=1, **options)
        return (ys * batch["x"]).sum() + (sums**2).sum() + (last["h"] * last["n"]).sum(), torch.tensor(7.0)

    return fn


def loop(f: Any, carry: Any, xs: Any, *args: Any, dim: int, reverse: bool = False) -> Any:
    """What a scan computes, by its definition."""
    out: list[Any] = []
    for x in reversed(xs.unbind(dim)) if reverse else xs.unbind(dim):
        carry, y = f(carry, x, *args)
        out.append(y)
    if reverse:
        out.reverse()
    return carry, tuple(torch.stack(each, dim) for each in zip(*out, strict=True))


def compare(fn: Any, want: Any, mesh: ff.Mesh, layout: ff.Layout, batch: Any, **options: Any) -> None:
    """A step of gradient descent with `fn` is one with `want` under torch.autograd."""
    step = ff.compile_step(
        fn, ff.sgd(lr=1.0), template=TEMPLATE, mesh=mesh, layout=layout, batch=batch, batch_dims="batch seq embed",
        **options,
    )  # fmt: skip
    params = ff.init(TEMPLATE, 2)
    leaves = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    total, count = want(leaves, batch)
    (total / count).backward()
    new, metrics = step.run_whole(ff.State(params, step.init(seed=0).opt, 0, True), batch)
    assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-12)
    for k, v in leaves.items():
        assert v.grad is not None
        torch.testing.assert_close(params[k] - new.params[k], v.grad, rtol=1e-10, atol=1e-12)


@settings(max_examples=20)
@given(
    n=st.integers(1, 9), chunk=st.sampled_from([None, 1, 3, 20]), reverse=st.booleans(),
    place=st.sampled_from(list(WHOLE_SEQ)), remat=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
def test_a_scan_is_the_loop(n: int, chunk: Any, reverse: bool, place: str, remat: str) -> None:
    batch = {"x": torch.randn(4, n, 3, dtype=F64, generator=torch.Generator().manual_seed(n))}
    fn, want = loss(ff.scan, chunk=chunk, reverse=reverse), loss(loop, reverse=reverse)
    compare(fn, want, *WHOLE_SEQ[place](), batch, remat=remat)


def decay(p: Any, batch: Any) -> tuple[Any, Any]:
    return torch.sigmoid(batch["x"] @ p["w"] + p["b"]), batch["x"]


def then(first: Any, second: Any) -> Any:
    return first[0] * second[0], first[1] * second[0] + second[1]


@settings(max_examples=20)
@given(
    n=st.sampled_from([4, 8, 12, 20, 64, 132]), reverse=st.booleans(), place=st.sampled_from(list(SPLIT_SEQ)),
    ranks=st.sampled_from([2, 4]),
)  # fmt: skip
def test_an_associative_scan_is_the_loop_also_over_a_split_sequence(
    n: int, reverse: bool, place: str, ranks: int
) -> None:
    batch = {"x": torch.randn(2, n, 3, dtype=F64, generator=torch.Generator().manual_seed(n))}

    def fn(p: Any, batch: Any) -> Any:
        _, h = ff.associative_scan(then, decay(p, batch), dim=1, reverse=reverse)
        return (h**2).sum(), torch.tensor(7.0)

    def want(p: Any, batch: Any) -> Any:
        a, b = decay(p, batch)
        h, total = torch.zeros_like(b[:, 0]), torch.zeros((), dtype=F64)
        for t in reversed(range(n)) if reverse else range(n):
            h = a[:, t] * h + b[:, t]
            total = total + (h**2).sum()
        return total, torch.tensor(7.0)

    compare(fn, want, *SPLIT_SEQ[place](ranks), batch)


def test_only_the_totals_of_a_split_scan_travel() -> None:
    batch = torch.ones(2, 4096, 3, dtype=F64)
    f = ff.compile(
        lambda p, x: ff.associative_scan(then, (torch.sigmoid(x), x), dim=1)[1],
        template={}, mesh=ff.Mesh(sp=4), layout=SPLIT_SEQ["seq"](4)[1], batch=batch, batch_dims="batch seq embed",
    )  # fmt: skip
    sent = sum(c.operand_bytes for c in f.program.collectives())
    totals = 2 * 2 * 64 * 3 * 8  # two values of 64 chunks for each of two rows of three
    assert totals <= sent <= 2 * totals
    assert f.out_types.show() == "f64[2, 4096@sp, 3]"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 65, 97, 128])
def test_an_order_of_factors_is_kept(n: int) -> None:
    """Products of matrices depend on the order."""
    x = torch.randn(n, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(n)).mul(0.7)
    got, want = ff.associative_scan(torch.matmul, x), [x[0]]
    back, wanted = ff.associative_scan(torch.matmul, x, reverse=True), [x[-1]]
    for t in range(1, n):
        want.append(want[-1] @ x[t])
        wanted.append(wanted[-1] @ x[n - 1 - t])
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(back, torch.stack(wanted[::-1]), rtol=1e-10, atol=1e-13)


def test_a_pair_that_overflows_is_none_of_the_others() -> None:
    """A value that is computed and thrown away has no part in the gradient."""
    x = torch.full((8,), 1e60, dtype=F64, requires_grad=True)
    with torch.no_grad():
        x[1:] = 1e-30
    ff.associative_scan(torch.mul, x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_chunk_is_traced_once_and_full_remat_keeps_the_carries() -> None:
    batch = {"x": torch.randn(2, 64, 3, dtype=F64)}

    def fn(p: Any, batch: Any) -> Any:
        first = {"h": batch["x"][:, 0], "n": torch.zeros((), dtype=F64)}
        last, (ys, _) = ff.scan(cell, first, batch["x"], p, dim=1)
        return ys.sum() + last["h"].sum(), torch.tensor(1.0)

    def kept(remat: str) -> int:
        """Bytes that the calls forward leave for those backward."""
        step = ff.compile_step(
            fn, ff.sgd(lr=1.0), template=TEMPLATE, mesh=ff.Mesh(), layout=layouts.single(), batch=batch,
            batch_dims="batch seq embed", remat=remat,
        )  # fmt: skip
        section = step.program.sections["first"]
        calls = [(i.func.name, row, outs) for i in section.instrs for row, outs in zip(i.ins, i.outs, strict=True)]
        read = {v for name, row, _ in calls if "backward" in name for v in row}
        forward = [i.func for i in section.instrs if i.func.name == "cell.forward"]
        assert len(forward) == 8
        # The first carry is traced by itself.
        assert len(set(forward)) <= 2, "chunks that are alike are one function"
        made = [v for name, _, outs in calls if name.endswith(".forward") for v in outs]
        return sum(8 * math.prod(section.types[v].shape) for v in made if v in read)

    everything = kept("none")
    assert kept("full") < everything / 4


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: ff.scan(cell, {}, {"a": torch.ones(2), "b": torch.ones(3)}), ["xs['a'] of size 2", "xs['b']"]),
        (lambda: ff.scan(lambda c, x: (c, x), torch.ones(()), torch.ones(3), dim=1), ["no dim 1"]),
        (lambda: ff.scan(lambda c: (c, None), torch.ones(())), ["length=None", "length="]),
        (lambda: ff.scan(lambda c, x: (c, x), torch.ones(()), torch.ones(0)), ["size 0", "longer xs"]),
        (lambda: ff.scan(lambda c, x: (c, x), torch.ones(()), torch.ones(3), chunk=-1), ["chunk=-1"]),
        (lambda: ff.scan(lambda c, x: (c.half(), x), torch.ones(()), torch.ones(3)), ["carry is () torch.float16"]),
        (lambda: ff.scan(lambda c, x: ((c, c), x), torch.ones(()), torch.ones(3)), ["the new carry"]),
        (lambda: ff.associative_scan(lambda a, b: (a, b), torch.ones(4)), ["f(a, b)"]),
        (lambda: ff.associative_scan(torch.add, {}), ["xs without a leaf"]),
        (lambda: ff.associative_scan(lambda a, b: a.sum(), torch.ones(4)), ["f(a, b)", "(2,)"]),
    ],
)  # fmt: skip
def test_what_a_scan_refuses(run: Any, words: list[str]) -> None:
    with pytest.raises(ff.FeatherError) as e:
        run()
    assert all(w in str(e.value) for w in (*words, "problem:")), str(e.value)
