"""Programs drawn at random: the source of a loss function over named dims, as a user might write it."""

import dataclasses
import linecache
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import fx_feather as ff

#: Sizes by dim name; the batch's is that of a microbatch. Two axes at once divide all but the vocabulary.
SIZES = {"batch": 8, "seq": 4, "embed": 4, "mlp": 8, "vocab": 5}
F64 = torch.float64
TEMPLATE = {
    name: ff.Param(dims, tuple(SIZES[d] for d in dims.split()), ff.normal(0.5), dtype=F64)
    for name, dims in {
        "up": "embed mlp",
        "down": "mlp embed",
        "head": "embed vocab",
        "table": "vocab embed",
        "scale": "embed",
        "bias": "mlp",
    }.items()
}
BATCH_DIMS = {"x": "batch seq embed", "ids": "batch seq"}

Dim = tuple[str, int]
Drawn = tuple[str, tuple[Dim, ...]]
FILE = "drawn_program.py"

UNARY = [
    "{x}.sin()", "{x}.tanh()", "{x}.tanh().exp()", "{x}.relu()", "{x}.sigmoid()", "{x}.abs()", "-{x}", "{x} * {x}",
    "{x} * 1.5", "{x} + 0.3", "2.0 - {x}", "({x}.abs() + 0.1).sqrt()", "F.gelu({x})", "({x}.abs() + 1).log()",
    "1.0 / ({x}.abs() + 1)", "F.softplus({x})", "{x}.clamp(-0.5, 0.7)", "{x}.pow(2)", "{x}.pow(1)",
    "torch.where({x} > 0.1, {x}, 0.0)", "torch.where({x} > 0.1, 2.0, {x})", "{x}.masked_fill({x} > 0.4, 0.0)",
    "{x}.detach() * {x}", "({x} > 0).to({x}.dtype)", "F.silu({x})", "{x}.square().mean() * {x}", "{x} - {x}.mean()",
    "{x} / ({x}.norm() + 1)", "{x} * torch.ones_like({x})", "{x} * {x}.abs().mean().clamp(min=1e-5)",
    "torch.full_like({x}, 0.5) * {x}", "F.leaky_relu({x}, 0.2)", "torch.erf({x})", "{x}.clone()", "{x}.contiguous()",
    "F.elu({x})", "F.mish({x})", "F.logsigmoid({x})", "F.hardswish({x})", "({x}.abs() + 0.2).rsqrt()", "{x}.atan()",
    "{x}.sign() * {x}", "{x}.sum() - {x}", "{x} * {x}.amax()", "{x} * ({x} * 0.1).sum().tanh()", "{x}.tanh().expm1()",
    "{x} / ({x}.square().sum() + 1)", "F.dropout({x}, 0.3, False)", "{x} * {x}.detach().abs().max()",
    "torch.zeros_like({x}) + {x}", "{x} * {x}.numel() * 0.1", "({x} > 0.1).logical_and({x} < 0.9).to({x}.dtype) * {x}",
]  # fmt: skip
BINARY = [
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y})", "torch.lerp({x}, {y}, 0.3)", "torch.addcmul({x}, {x}, {y})",
    "torch.where({y} > 0, {x}, -1.0)", "{x} * {y} + {x}", "torch.minimum({x}, {y})", "torch.sub({x}, {y}, alpha=0.3)",
    "torch.logaddexp({x}, {y})", "torch.addcdiv({x}, {x}, {y}.abs() + 1)", "{x}.masked_fill({y} > 0.2, 0.3)",
    "F.mse_loss({x}, {y}.expand_as({x}), reduction='none')", "{x} * {y}.mean()", "{x} - {y}.sum()",
    "F.binary_cross_entropy_with_logits({x}, {y}.expand_as({x}).sigmoid(), reduction='none')",
    "F.huber_loss({x}, {y}.expand_as({x}), reduction='none')", "torch.hypot({x}.abs() + 0.5, {y})",
]  # fmt: skip
#: With the dims that are reduced; a name that the rest of the code reads is the family of the statement.
REDUCED = [
    "{x}.sum({d}, keepdim={k})",
    "{x}.mean({d}, keepdim={k})",
    "{x}.amax({d}, keepdim={k})",
    "torch.logsumexp({x}, {d}, keepdim={k})",
    "{x}.var({d}, keepdim={k})",
    "{x}.pow(2).sum({d}, keepdim={k})",
    "{x}.amin({d}, keepdim={k})",
    "torch.linalg.vector_norm({x} + 2, dim={d}, keepdim={k})",
    "{x}.abs().sum({d}, keepdim={k}).sqrt()",
    "({x} + 2).std({d}, keepdim={k})",
    "{x}.amax({d}, keepdim={k}).exp()",
    "torch.linalg.vector_norm({x} + 2, 1, dim={d}, keepdim={k})",
    "({x} > 0).sum({d}, keepdim={k}).to({x}.dtype) * 0.5",
]
#: Over one dim.
ONE = [
    "({x} * 0.3 + 1).prod({d}, keepdim={k})", "{x}.max({d}, keepdim={k})[0]", "{x}.min({d}, keepdim={k})[0]",
    "{x}.argmax({d}, keepdim={k}).to({x}.dtype) * 0.5", "{x}.topk(2, {d})[0].sum({d}, keepdim={k})",
    "torch.take_along_dim({x}, {x}.argmin({d}, keepdim=True), {d}).sum({d}, keepdim={k})",
    "torch.linalg.norm({x} + 2, dim={d}, keepdim={k})",
]  # fmt: skip
ALONG = [
    "torch.softmax({x}, {d})", "torch.log_softmax({x}, {d})", "F.layer_norm({x}, {x}.shape[-1:])", "{x}.flip({d})",
    "F.normalize({x} + 1.5, dim={d})", "-(torch.softmax({x}, {d}) * torch.log_softmax({x}, {d}))",
    "F.rms_norm({x}, {x}.shape[-1:])", "torch.softmax({x}.masked_fill({x} > 0.5, -1e9), {d})", "F.softmin({x}, {d})",
    "{x} - {x}.logsumexp({d}, keepdim=True)", "{x} * ({x} == {x}.amax({d}, keepdim=True))", "{x} - {x}.mean({d}, True)",
    "{x} / {x}.abs().sum({d}, keepdim=True).clamp(min=0.1)", "torch.softmax({x}, {d}).square() * {x}",
    "torch.softmax({x} * {x}.exp().sum({d}, keepdim=True).log(), {d})",
]  # fmt: skip
WHOLE = [
    "{x}.cumsum({d})",
    "{x}.roll(1, {d})",
    "{x}.sort({d})[0]",
    "(1 + 0.1 * {x}).cumprod({d})",
    "torch.logcumsumexp({x}, {d})",
]

#: Statements that write to a value `out` of the shape of `x`; the last ones need more than one column.
WRITES = [
    "{out}.mul_(1.5)", "{out} += {x}", "{out} -= 0.3", "{out}.relu_()", "{out}.masked_fill_({x} > 0.3, 0.1)",
    "{out}[..., 0] = 0.7", "{out}[..., 0].add_({x}[..., -1])", "{out}.copy_({x} * {x})", "{out}.unsqueeze(0).mul_(2.0)",
    "{out} *= {out}.sum().tanh()", "{out}.clamp_(-0.5, 0.6)",
    "{out}[..., 1:] *= 2.0", "{out}[..., :-1] += {x}[..., 1:]", "{out}[..., 1:].tanh_()",
    "{out}[..., ::2] = {x}[..., ::2].sin()",
]  # fmt: skip
WIDE = 4


@dataclasses.dataclass(frozen=True)
class Program:
    """A drawn function: its source, and which families of statements it has."""

    source: str
    families: tuple[str, ...]

    def __repr__(self) -> str:
        return f"\n{self.source}"

    def loss(self) -> Callable[[Any, Any], Any]:
        """The function; its lines are those of a file of their own, which messages name."""
        linecache.cache[FILE] = (len(self.source), None, self.source.splitlines(keepends=True), FILE)
        scope: dict[str, Any] = {"torch": torch, "F": F, "ff": ff}
        exec(compile(self.source, FILE, "exec"), scope)
        fn: Callable[[Any, Any], Any] = scope["loss_fn"]
        return fn


class Writer:
    """Writes statements over values whose dims are known."""

    def __init__(self, draw: st.DrawFn, values: list[Drawn], indent: str = "    "):
        self.draw, self.values, self.indent = draw, values, indent
        self.lines: list[str] = []
        self.families: list[str] = []
        self.used: set[str] = set()

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def value(self, wanted: Callable[[tuple[Dim, ...]], bool] = lambda dims: True) -> Drawn | None:
        fitting = [v for v in self.values if wanted(v[1])]
        if not fitting:
            return None
        # Late values more often, so that programs are deep; and what is made of the batch, or half were of parameters.
        return self.pick([*fitting, *fitting[-3:], *(v for v in fitting if ("batch", SIZES["batch"]) in v[1])])

    def write(self, family: str, text: str, dims: tuple[Dim, ...], *operands: str) -> None:
        name = f"v{len(self.values)}"
        self.lines.append(f"{self.indent}{name} = {text}")
        self.values.append((name, dims))
        self.families.append(family)
        self.used.update(operands)

    def statement(self) -> None:
        kind = self.pick([
            "unary", "unary", "binary", "binary", "reduce", "reduce", "along", "matmul", "matmul", "view", "view",
            "index", "join", "constrain", "block", "parameter", "write",
        ])  # fmt: skip
        getattr(self, f"_{kind}")()

    def _unary(self) -> None:
        x = self.value()
        assert x is not None
        self.write("unary", self.pick(UNARY).format(x=x[0]), x[1], x[0])

    def _parameter(self) -> None:
        """A function of a parameter alone."""
        x = self.value(lambda dims: 0 < len(dims) < 3 and all(d[0] not in ("batch", "seq") for d in dims))
        if x is not None:
            self.write("parameter", self.pick(UNARY).format(x=x[0]), x[1], x[0])

    def _binary(self) -> None:
        x = self.value()
        assert x is not None
        y = self.value(lambda dims: len(dims) <= len(x[1]) and all(
            a == b or b[1] == 1 for a, b in zip(reversed(x[1]), reversed(dims), strict=False)
        ))  # fmt: skip
        if y is not None:
            self.write("binary", self.pick(BINARY).format(x=x[0], y=y[0]), x[1], x[0], y[0])

    def _reduce(self) -> None:
        x = self.value(lambda dims: len(dims) > 0 and all(n > 1 for _, n in dims))
        if x is None:
            return
        n = len(x[1])
        at = sorted(self.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n)))
        keep = self.draw(st.booleans())
        dims = tuple(("_", 1) if i in at else d for i, d in enumerate(x[1]) if keep or i not in at)
        pattern = self.pick([*REDUCED, *ONE] if len(at) == 1 else REDUCED)
        self.write("reduce", pattern.format(x=x[0], d=at[0] if pattern in ONE else tuple(at), k=keep), dims, x[0])

    def _along(self) -> None:
        x = self.value(lambda dims: len(dims) > 0 and dims[-1][1] > 1)
        if x is None:
            return
        d = self.draw(st.integers(-len(x[1]), -1))
        pattern = self.pick([*ALONG, *WHOLE])
        self.write("along", pattern.format(x=x[0], d=(d,) if "flip" in pattern else d), x[1], x[0])

    def _matmul(self) -> None:
        if self.pick([False, False, True]):
            return self._pairs()
        w = self.value(lambda dims: len(dims) == 2)
        x = w and self.value(lambda dims: len(dims) > 1 and dims[-1] == w[1][0])
        if not (w and x):
            return
        forms = ["{x} @ {w}", "F.linear({x}, {w}.t())", "torch.einsum('...k,kn->...n', {x}, {w})"]
        self.write("matmul", self.pick(forms).format(x=x[0], w=w[0]), (*x[1][:-1], w[1][1]), x[0], w[0])

    def _pairs(self) -> None:
        """Products of two values by their last dims: a tied head, or scores and what they weigh."""
        x = self.value(lambda dims: len(dims) in (2, 3))
        y = x and self.value(
            lambda dims: len(dims) >= 2 and dims[-1] == x[1][-1] and dims[:-2] == (x[1][:-2] if len(dims) > 2 else ())
        )
        if not (x and y):
            return
        scores = "{x} @ {y}.transpose(-1, -2)"
        forms = [scores, scores, f"torch.softmax({scores} * 0.5, -1) @ {{y}}"]
        if len(y[1]) == 3:
            forms.append(
                "F.scaled_dot_product_attention({x}.unsqueeze(1), {y}.unsqueeze(1), {y}.unsqueeze(1)).squeeze(1)"
            )
        form = self.pick(forms)
        self.write(
            "matmul", form.format(x=x[0], y=y[0]), (*x[1][:-1], y[1][-2] if form == scores else y[1][-1]), x[0], y[0]
        )

    def _view(self) -> None:
        x = self.value(lambda dims: len(dims) > 0)
        if x is None:
            return
        name, dims = x
        n = len(dims)
        kind = self.pick(["transpose", "unsqueeze", "flatten", "expand", "reshape", "split", "repeat", "squeeze"])
        if kind == "transpose" and n > 1:
            i, j = sorted(self.draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=2)))
            swapped = list(dims)
            swapped[i], swapped[j] = dims[j], dims[i]
            self.write("view", f"{name}.transpose({i}, {j})", tuple(swapped), name)
        elif kind == "unsqueeze" and n < 4:
            i = self.draw(st.integers(0, n))
            self.write("view", f"{name}.unsqueeze({i})", (*dims[:i], ("_", 1), *dims[i:]), name)
        elif kind == "flatten" and n > 1:
            i = self.draw(st.integers(0, n - 2))
            joint = ("_", dims[i][1] * dims[i + 1][1])
            self.write("view", f"{name}.flatten({i}, {i + 1})", (*dims[:i], joint, *dims[i + 2 :]), name)
        elif kind == "expand" and any(d[1] == 1 for d in dims):
            wide = tuple(("_", 3) if d[1] == 1 else d for d in dims)
            self.write("view", f"{name}.expand({', '.join(str(d[1]) for d in wide)})", wide, name)
        elif kind == "repeat" and n < 4:
            i = self.draw(st.integers(0, n - 1))
            wide = (*dims[:i], ("_", dims[i][1] * 2), *dims[i + 1 :])
            twice = ", ".join("2" if j == i else "1" for j in range(n))
            self.write("view", self.pick([f"{name}.repeat_interleave(2, {i})", f"{name}.repeat({twice})"]), wide, name)
        elif kind == "squeeze":
            self.write("view", f"{name}.squeeze()", tuple(d for d in dims if d[1] > 1), name)
        elif kind == "split" and n < 4 and dims[-1][1] % 2 == 0:
            half = ("_", dims[-1][1] // 2)
            pattern = self.pick(["{x}.unflatten(-1, (2, {h}))", "{x}.reshape(*{x}.shape[:-1], 2, {h})"])
            self.write("view", pattern.format(x=name, h=half[1]), (*dims[:-1], ("_", 2), half), name)
        else:
            self.write("view", f"{name}.reshape({name}.shape)", dims, name)

    def _index(self) -> None:
        kind = self.pick([
            "table", "select", "slice", "chunk", "pick", "one_hot", "pad", "take", "rotate", "rows", "each",
        ])  # fmt: skip
        if kind == "table":
            w = self.value(lambda dims: len(dims) == 2 and dims[0] == ("vocab", SIZES["vocab"]))
            if w is not None:
                form = self.pick(["{w}[batch['ids']]", "F.embedding(batch['ids'], {w})"])
                dims = (("batch", SIZES["batch"]), ("seq", SIZES["seq"]), w[1][1])
                self.write("index", form.format(w=w[0]), dims, w[0])
            return
        if kind == "pick":
            x = self.value(lambda dims: [d[0] for d in dims] == ["batch", "seq", "vocab"])
            if x is not None:
                form = self.pick([
                    "{x}.gather(-1, batch['ids'].unsqueeze(-1)).squeeze(-1)",
                    "-F.cross_entropy({x}.flatten(0, 1), batch['ids'].flatten(), reduction='none').view({x}.shape[:2])",
                ])  # fmt: skip
                self.write("index", form.format(x=x[0]), x[1][:2], x[0])
            return
        if kind == "rows":
            x = self.value(lambda dims: len(dims) > 1 and [d[0] for d in dims[:2]] == ["batch", "seq"])
            if x is not None:
                n = f"torch.arange({x[0]}.shape[0])"
                one = f"{x[0]}[{n}, batch['ids'][:, 0] % {SIZES['seq']}]"
                several = f"{x[0]}[{n}[:, None], batch['ids'] % {SIZES['seq']}]"
                if self.draw(st.booleans()):
                    return self.write("index", one, (x[1][0], *x[1][2:]), x[0])
                self.write("index", several, x[1], x[0])
            return
        if kind == "one_hot":
            hot = f"F.one_hot(batch['ids'], {SIZES['vocab']}).to(batch['x'].dtype)"
            return self.write("index", hot, tuple((d, SIZES[d]) for d in ("batch", "seq", "vocab")))
        x = self.value(lambda dims: len(dims) > 0 and dims[-1][1] > 1)
        if x is None:
            return
        name, dims = x
        if kind == "pad":
            return self.write("index", f"F.pad({name}, (1, 2))", (*dims[:-1], ("_", dims[-1][1] + 3)), name)
        if kind == "take":
            text = f"{name}.index_select(-1, torch.arange(2, device={name}.device))"
            return self.write("index", text, (*dims[:-1], ("_", 2)), name)
        if kind == "rotate":
            return self.write("index", f"torch.cat([{name}[..., 1:], -{name}[..., :1]], -1)", dims, name)
        i = self.draw(st.integers(0, len(dims) - 1))
        if dims[i][1] < 2:
            return
        if kind == "each" and dims[i][1] < 9:
            self.write("index", f"torch.stack({name}.unbind({i})[::-1], {i})", dims, name)
        elif kind == "select":
            self.write("index", f"{name}.select({i}, {dims[i][1] - 1})", (*dims[:i], *dims[i + 1 :]), name)
        elif kind == "slice":
            short = ("_", dims[i][1] - 1)
            self.write("index", f"{name}.narrow({i}, 1, {short[1]})", (*dims[:i], short, *dims[i + 1 :]), name)
        elif kind == "chunk" and dims[i][1] % 2 == 0:
            half = ("_", dims[i][1] // 2)
            self.write("index", f"{name}.chunk(2, {i})[1]", (*dims[:i], half, *dims[i + 1 :]), name)

    def _join(self) -> None:
        x = self.value(lambda dims: len(dims) > 0)
        y = x and self.value(lambda dims: dims == x[1])
        if not (x and y):
            return
        i = self.draw(st.integers(0, len(x[1]) - 1))
        if self.draw(st.booleans()):
            wide = ("_", x[1][i][1] * 2)
            self.write("join", f"torch.cat([{x[0]}, {y[0]}], {i})", (*x[1][:i], wide, *x[1][i + 1 :]), x[0], y[0])
        elif len(x[1]) < 4:
            self.write("join", f"torch.stack([{x[0]}, {y[0]}], {i})", (*x[1][:i], ("_", 2), *x[1][i:]), x[0], y[0])

    def _constrain(self) -> None:
        x = self.value(
            lambda dims: len(dims) > 0 and len({d[0] for d in dims if d[0] != "_"}) == sum(d[0] != "_" for d in dims)
        )
        if x is None:
            return
        keep = self.draw(st.lists(st.booleans(), min_size=len(x[1]), max_size=len(x[1])))
        names = " ".join(d[0] if k and SIZES.get(d[0]) == d[1] else "_" for d, k in zip(x[1], keep, strict=True))
        self.write("constrain", f"ff.constrain({x[0]}, {names!r})", x[1], x[0])

    def _write(self) -> None:
        """In place, on a value made here."""
        x = self.value(lambda dims: len(dims) > 0)
        if x is None:
            return
        name, dims = x
        made = self.pick(["{x}.clone()", "{x} * 2.0", "torch.zeros_like({x})", "{x}.new_zeros({x}.shape)", "{x} + 0.5"])
        self.write("write", made.format(x=name), dims, name)
        out, writes = self.values[-1][0], WRITES if dims[-1][1] > 1 else WRITES[:-WIDE]
        for _ in range(self.draw(st.integers(1, 2))):
            self.lines.append(self.indent + self.pick(writes).format(out=out, x=name))

    def _block(self) -> None:
        """A function called twice: of the same parameter or of another, on two activations."""
        w = self.value(lambda dims: len(dims) == 2 and dims[0][0] in ("embed", "mlp"))
        x = w and self.value(lambda dims: len(dims) > 1 and dims[-1] == w[1][0])
        if not (w and x) or self.indent != "    ":
            return
        inner = type(self)(self.draw, [("w", w[1]), ("x", x[1])], "        ")
        inner.write("matmul", "x @ w", (*x[1][:-1], w[1][1]))
        for _ in range(self.draw(st.integers(0, 3))):
            inner.statement()
        out, dims = inner.values[-1]
        f = f"f{len(self.values)}"
        self.lines += [f"{self.indent}@ff.block", f"{self.indent}def {f}(x, w):", *inner.lines]
        self.lines.append(f"{inner.indent}return {out}")
        self.families += inner.families
        second = self.pick([v for v in self.values if v[1] == x[1]])
        self.write("block", f"{f}({x[0]}, {w[0]})", dims, x[0], w[0])
        self.write("block", f"{f}({second[0]}, {w[0]})", dims, second[0], w[0])


@st.composite
def programs(draw: st.DrawFn, least: int = 2, most: int = 9, kind: type[Writer] = Writer) -> Program:
    """A loss of a few statements: the values that nothing else uses are weighed, and added up."""
    values: list[Drawn] = [
        *((f"p[{k!r}]", tuple((d, SIZES[d]) for d in p.dim_names)) for k, p in TEMPLATE.items()),
        ("batch['x']", tuple((d, SIZES[d]) for d in BATCH_DIMS["x"].split())),
    ]
    writer = kind(draw, values)
    first = len(values)
    for _ in range(draw(st.integers(least, most))):
        writer.statement()
    ends = [v for v, _ in values[first:] if v not in writer.used] or [values[-1][0]]
    total = " + ".join(draw(st.sampled_from([f"{v}.sum()", f"{v}.pow(2).sum()", f"{v}.mean()"])) for v in ends)
    lines = ["def loss_fn(p, batch):", *writer.lines]
    lines += [f"    total = {total}", "    return total, torch.tensor(float(batch['x'].shape[0]))"]
    return Program("\n".join(lines) + "\n", tuple(sorted(set(writer.families))))
