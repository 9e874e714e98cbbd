"""Law: a random optimizer on a mesh, split by any layout, is the plain function on one device, or is refused by line.

Each program is drawn from a grammar: pointwise operators of gradients, parameters and state, reductions of leaves and
over all leaves, statistics of rows and columns, functions of the step, matmuls of matrices; as blocks or in the open.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fx_feather as ff
from fx_feather import optim, testing, tree

PROGRAMS = 100
AT_ONCE = 10

LEAVES = {
    "up": ff.Param("embed mlp", (6, 4), dtype=torch.float64),
    "down": ff.Param("mlp embed", (4, 6), dtype=torch.float64),
    "square": ff.Param("embed _", (6, 6), dtype=torch.float64),
    "experts": ff.Param("_ embed mlp", (2, 6, 4), dtype=torch.float64),
    "bias": ff.Param("embed", (6,), dtype=torch.float64),
    # Of sizes that some axis does not divide, as what rests may have.
    "odd": ff.Param("embed _", (6, 3), dtype=torch.float64),
    "gain": ff.Param("", (), dtype=torch.float64),
}
TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "up": lambda x, w: torch.tanh(x @ w),
    "down": lambda x, w: (x @ w.mT) ** 2,
    "square": lambda x, w: torch.sigmoid(x @ w),
    "experts": lambda x, w: (x @ w[0]) * torch.tanh(x @ w[1]),
    "bias": lambda x, w: torch.tanh(x + w) ** 2,
    "odd": lambda x, w: torch.sin(x @ w),
    "gain": lambda x, w: torch.tanh(x * w) ** 2,
}


def loss(params: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
    terms = [TERMS[name](batch, w).sum() for name, w in params.items()]
    return sum(terms[1:], terms[0]), torch.tensor(batch.shape[0])


KINDS = {
    "ddp": testing.strategies.KINDS["ddp"],
    "zero1": testing.strategies.KINDS["zero1"],
    "zero2": testing.strategies.KINDS["zero2"],
    "fsdp": testing.strategies.KINDS["fsdp"],
    "fsdp of mlp": lambda axis: ff.Layout(
        compute={"batch": axis}, store=ff.Store({"mlp": axis}, {"mlp": axis}, {"mlp": axis})
    ),
    "tp": lambda axis: ff.Layout(compute={"mlp": axis}),
}

Value = Tensor
Env = dict[str, Value]


def _row_written(x: Value) -> Value:
    out = torch.zeros_like(x)
    out[0] = x[0]
    out[1:].add_(0.5)
    return out


# What keeps values in a range in which rounding stays small, and has no jump where a value may lie.
UNARY: dict[str, Callable[[Value], Value]] = {
    "tanh": torch.tanh,
    "square": lambda x: x * x,
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "where": lambda x: torch.where(x > 0, x, 0.3 * x),
    "relu": torch.relu,
    "exp": lambda x: torch.exp(x.clamp(max=1.0)),
    "neg": lambda x: -x,
    "like": lambda x: torch.ones_like(x) - 0.5 * x,
    "full": lambda x: torch.full_like(x, 0.25) + x,
}
BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "maximum": torch.maximum,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.2),
    "where": lambda x, y: torch.where(x > y, x, 0.5 * y),
}
# Of one leaf: a number, or one for each row or column.
REDUCE: dict[str, Callable[[Value], Value]] = {
    "sum": lambda x: x.sum() / 8,
    "mean": lambda x: x.mean(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "rms": lambda x: (x * x).mean().sqrt(),
    "amax": lambda x: x.abs().amax(),
    "rows": lambda x: x.mean(-1, keepdim=True) if x.ndim else x,
    "columns": lambda x: (x * x).sum(0, keepdim=True) if x.ndim else x,
    "row norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) if x.ndim else x,
    "top": lambda x: x.amax(-1, keepdim=True) if x.ndim else x,
    "softmax": lambda x: torch.softmax(x, -1) if x.ndim else x,
    "std": lambda x: x.var(correction=0).sqrt() if x.ndim else x,
}
MATRIX: dict[str, Callable[[Value], Value]] = {
    "gram": lambda x: (x @ x.mT) @ x / (x * x).sum().add(1),
    "other gram": lambda x: x @ (x.mT @ x) / (x * x).sum().add(1),
    "newton": lambda x: 1.5 * x - 0.5 * (x @ x.mT) @ x,
    "transposed": lambda x: (x.mT * 2).mT,
    "flat": lambda x: (x.reshape(-1) * 0.5).reshape(x.shape),
    "outer": lambda x: x.mean(1, keepdim=True) * x.mean(0, keepdim=True),
    "upper": lambda x: x.triu(),
    "cumsum": lambda x: x.cumsum(-1) * 0.3,
    "written over": lambda x: x.clone().mul_(0.5).add_(x),
    "row written": _row_written,
    "filled": lambda x: x.masked_fill(x > 0.5, 0.5),
}
OF_STEP: dict[str, Callable[[Value], Value]] = {
    "cos": lambda t: torch.cos(0.3 * t.double()),
    "decay": lambda t: 1 - torch.pow(0.9, t.double() + 1),
    "where": lambda t: torch.where(t < 1, 0.5, 1.0).double(),
    "inverse": lambda t: 1 / (t.double() + 1),
}
OF_ALL: dict[str, Callable[[list[Value]], Value]] = {
    "norm": lambda xs: optim.global_norm(xs),
    "largest": lambda xs: torch.stack([x.abs().max() for x in xs]).max(),
    "sum": lambda xs: sum((x.sum() for x in xs[1:]), xs[0].sum()) / 16,
    "mean of means": lambda xs: torch.stack([x.mean() for x in xs]).mean(),
}


class Drawn:
    """An optimizer drawn from the grammar: a list of instructions, which `init` and `update` carry out."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.blocks, self.slots = rng.random() < 0.5, [f"s{i}" for i in range(rng.randint(0, 2))]
        self.start = {s: rng.choice(["zeros", "copy", "norm", "rows"]) for s in self.slots}
        names = ["g", "p", *self.slots]
        # Numbers that all leaves share, of all gradients or parameters, or of the step.
        self.shared = [("all", rng.choice(["g", "p"]), rng.choice(list(OF_ALL))) for _ in range(rng.randint(0, 2))]
        self.shared += [("step", "", rng.choice(list(OF_STEP))) for _ in range(rng.randint(0, 2))]
        names += [f"n{i}" for i in range(len(self.shared))]
        self.program: list[tuple[str, str, list[str]]] = []
        for i in range(rng.randint(1, 7)):
            kind, table = rng.choice(
                [("unary", UNARY)] * 3 + [("binary", BINARY)] * 4 + [("reduce", REDUCE)] * 2 + [("matrix", MATRIX)]
            )
            # What was made last is used more often: chains, and not a list of unused values.
            operands = [rng.choice(names[-2:] if rng.random() < 0.6 else names) for _ in range(2)]
            self.program.append((kind, rng.choice(list(table)), operands[: 2 if kind == "binary" else 1]))
            names.append(f"v{i}")
        self.result = names[-1]
        self.kept = {s: rng.choice(names) for s in self.slots}
        self.mixed = rng.choice(names)

    def __repr__(self) -> str:
        return f"shared={self.shared} {self.program} kept={self.kept} start={self.start} blocks={self.blocks}"

    def _started(self, kind: str, p: Value) -> Value:
        if kind == "norm":
            return torch.linalg.vector_norm(p)
        if kind == "rows":
            return p.mean(-1)
        return p.clone() if kind == "copy" else torch.zeros_like(p)

    def init(self, params: Any) -> Any:
        slots = {s: tree.map(lambda p, s=s: self._started(self.start[s], p), params) for s in self.slots}
        return {"step": torch.zeros((), dtype=torch.int64), **slots}

    def _leaf(self, g: Value, p: Value, slots: list[Value], numbers: list[Value]) -> list[Value]:
        env: Env = {"g": g, "p": p, **{f"n{i}": n for i, n in enumerate(numbers)}}
        for s, x in zip(self.slots, slots, strict=True):
            env[s] = x.unsqueeze(-1) if self.start[s] == "rows" and p.ndim else x
        for i, (kind, name, operands) in enumerate(self.program):
            xs = [env[o] for o in operands]
            if kind == "matrix":
                x = xs[0].expand(p.shape) if xs[0].shape != p.shape else xs[0]
                env[f"v{i}"] = MATRIX[name](x) if p.ndim == 2 else x
            else:
                env[f"v{i}"] = {"unary": UNARY, "binary": BINARY, "reduce": REDUCE}[kind][name](*xs)
        kept = []
        for s, x in zip(self.slots, slots, strict=True):
            new = env[self.kept[s]].expand(p.shape) if env[self.kept[s]].shape != p.shape else env[self.kept[s]]
            new = self._started(self.start[s], new) if self.start[s] in ("norm", "rows") else new
            kept.append(torch.lerp(x, torch.tanh(new), 0.25))
        update = torch.tanh(env[self.result]) + 0.3 * torch.tanh(env[self.mixed]) + 0.1 * torch.tanh(g)
        return [-0.05 * update.expand(p.shape), *kept]

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        gs, treedef = tree.flatten(grads)
        of = {"g": gs, "p": tree.leaves(params)}
        numbers = [
            OF_ALL[name](of[what]) if kind == "all" else OF_STEP[name](state["step"])
            for kind, what, name in self.shared
        ]
        leaf: Any = ff.block(self._leaf, name="leaf") if self.blocks else self._leaf
        columns = [tree.leaves(state[s]) for s in self.slots]
        slots = [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in gs]
        out = [leaf(g, p, own, numbers) for g, p, own in zip(gs, of["p"], slots, strict=True)]
        trees = [tree.unflatten(treedef, column) for column in zip(*out, strict=True)]
        return trees[0], {"step": state["step"] + 1, **dict(zip(self.slots, trees[1:], strict=True))}


def check(seed: int) -> str:
    """Draws one program, mesh and layout; says "equal", or why it is refused."""
    drawn, rng = Drawn(seed), random.Random(-seed)
    sizes = rng.choice([(2,), (4,), (2, 2)])
    mesh = ff.Mesh(**dict(zip("ab", sizes, strict=False)))
    layout = ff.Layout(unused_ok=True)
    names = [rng.choice([k for k in KINDS if size == 2 or k != "tp"]) for size in sizes]
    for name, axis in zip(names, mesh.axes, strict=True):
        layout = layout | KINDS[name](axis)
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    optimizer = ff.Transform(drawn.init, drawn.update)
    try:
        testing.assert_equivalent(
            loss,
            template={name: LEAVES[name] for name in rng.sample(list(LEAVES), rng.choice([1, 2, 2]))},
            batch=batch,
            batch_dims="batch embed",
            mesh=mesh,
            layout=layout,
            optimizer=optimizer,
            steps=2,
            accumulate=rng.choice([1, 1, 2]),
        )
    except ff.FeatherError as e:
        if "test_optimizers.py" in str(e):
            return str(e)
        raise AssertionError(f"seed {seed}, {names} on {mesh}, {drawn}: refused without the line") from e
    except Exception as e:
        raise AssertionError(f"seed {seed}, {names} on {mesh}, {drawn}") from e
    return "equal"


@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_random_optimizers_are_one_device(first: int, pytestconfig: pytest.Config, record_property: Any) -> None:
    times = 20 if pytestconfig.getoption("--deep") else 1
    said = [check(seed + PROGRAMS * k) for seed in range(first, first + AT_ONCE) for k in range(times)]
    record_property("examples", len(said))
    assert said.count("equal") >= 0.6 * len(said), said
