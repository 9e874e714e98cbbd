"""The law of programs: whatever function is drawn, in whatever layout, is what torch.autograd makes of it, or refused.

The function on one device under plain `torch.autograd` is the specification, not this package's own `single` layout: a
fault that all layouts share would hide there.
"""

import functools as ft
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import fx_feather as ff
import layouts
from fx_feather.errors import NonFiniteError
from tests.laws.drawn import BATCH_DIMS, F64, FILE, SIZES, TEMPLATE, Program, programs
from tests.laws.test_planted import hands_a_pending_sum_on, leaves_infinite_padding

RTOL = 1e-9
REMAT = ["none", "selective", "full"]
#: Tests of one law, so that workers share them, and programs that each draws: 300 in all, 10,000 with `--deep`.
GROUPS, CI, DEEP = 6, 50, 1667
#: Of what each draws, how much must compile and be compared, and of the programs with a kind of statement, if it draws
#: enough of them: a law of refusals would prove nothing.
COMPARED, OF_A_FAMILY, ENOUGH = 0.6, 0.4, 8

KINDS: dict[str, Any] = {
    "single": lambda a: layouts.single(),
    "ddp": layouts.ddp,
    "fsdp": layouts.fsdp,
    "zero1": layouts.zero1,
    "zero2": layouts.zero2,
    "tp": layouts.tp,
    "tp_sp": layouts.tp_sp,
    **{f"{d} split": lambda a, d=d: ff.Layout(compute={d: a}) for d in ("embed", "mlp", "vocab", "seq", "batch")},
    "store": lambda a: ff.Layout(store=ff.Store(params={"mlp": a}, grads={"mlp": a}, opt={"mlp": a})),
}


@st.composite
def places(draw: st.DrawFn) -> tuple[ff.Mesh, ff.Layout]:
    """A mesh of one or two axes, and what each is for."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2))
    axes = "ab"[: len(kinds)]
    made = [KINDS[kind](a) for kind, a in zip(kinds, axes, strict=True)]
    size = draw(st.sampled_from([2, 2, 4])) if len(kinds) == 1 else 2
    return ff.Mesh(**dict.fromkeys(axes, size)), ft.reduce(lambda x, y: x | y, made)


def example(seed: int, parts: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = [SIZES[d] * (parts if d == "batch" else 1) for d in BATCH_DIMS["x"].split()]
    x = torch.randn(shape, generator=g, dtype=F64)
    return {"x": x, "ids": torch.randint(0, SIZES["vocab"], shape[:2], generator=g)}


def reference(program: Program, params: Any, batch: Any, parts: int) -> tuple[float, dict[str, torch.Tensor]] | None:
    """Loss and gradients of sum / count, by torch.autograd; None if that refuses a write to what it has saved."""
    leaves = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    total, count = torch.zeros((), dtype=F64), 0.0
    for i in range(parts):
        some = {k: v.chunk(parts)[i] for k, v in batch.items()}
        one, n = program.loss()(leaves, some)
        total, count = total + one, count + float(n)
    loss = total / count
    if loss.requires_grad:
        try:
            loss.backward()
        except RuntimeError as e:
            if "modified by an inplace operation" not in str(e):
                raise
            return None
    return float(loss.detach()), {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}


def computed(
    program: Program, params: Any, batch: Any, mesh: ff.Mesh, layout: ff.Layout, parts: int, remat: str
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same of a compiled step of gradient descent at a rate of 1."""
    step = ff.compile_step(
        program.loss(), ff.sgd(lr=1.0), template=TEMPLATE, mesh=mesh, layout=layout, batch=batch,
        batch_dims=BATCH_DIMS, accumulate=parts, remat=remat,
    )  # fmt: skip
    state = ff.State(params, step.init(seed=0).opt, 0, True)
    new, metrics = step.run_whole(state, batch)
    return metrics["loss"], {k: params[k] - new.params[k] for k in params}


def differences(got: tuple[float, Any], want: tuple[float, Any], scale: float) -> list[str]:
    """What is off by more than the tolerance, relative to the largest gradient: some are nothing but rounding."""
    out = []
    if not abs(got[0] - want[0]) <= RTOL * max(abs(want[0]), 1.0):  # so that NaN is a difference too
        out.append(f"loss {got[0]!r}, right {want[0]!r}")
    for k, g in want[1].items():
        off = float((got[1][k] - g).norm())
        if not off <= RTOL * max(float(g.norm()), 1e-3 * scale):
            out.append(f"gradient of {k!r} is off by {off:.2e} of {float(g.norm()):.2e}")
    return out


def check(program: Program, mesh: ff.Mesh, layout: ff.Layout, parts: int, remat: str) -> bool | None:
    """Whether the program compiles in that layout; then it must be right, and if not, the message names a line.

    None if there is nothing to compare with.
    """
    params, batch = ff.init(TEMPLATE, 3), example(1, parts)
    want = reference(program, params, batch, parts)
    if want is None:
        return None
    scale = max([1.0, *(float(g.norm()) for g in want[1].values())])
    try:
        got = computed(program, params, batch, mesh, layout, parts, remat)
    except NonFiniteError:
        assert not all(x.isfinite().all() for x in (torch.tensor(want[0]), *want[1].values())), (
            "the right values are finite"
        )
        return None
    except ff.FeatherError as e:
        if FILE not in str(e):
            raise AssertionError("the message names no line of the program") from e
        return False
    wrong = differences(got, want, scale)
    assert not wrong, f"on {mesh} with {layout}, accumulate={parts}, remat={remat!r}: " + "; ".join(wrong)
    return True


@pytest.mark.parametrize("group", range(GROUPS))
def test_any_program_is_itself_in_any_layout(group: int, request: pytest.FixtureRequest) -> None:
    compared: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    deep = request.config.getoption("--deep")

    @seed(group)
    @settings(max_examples=DEEP if deep else CI, derandomize=False)
    @given(programs(), places(), st.sampled_from([1, 1, 2]), st.sampled_from(REMAT))
    def law(program: Program, place: tuple[ff.Mesh, ff.Layout], parts: int, remat: str) -> None:
        families = ("all", *program.families)
        compiled = check(program, *place, parts, remat)
        if compiled is not None:
            drawn.update(families)
        if compiled:
            compared.update(families)

    law()
    few = {f: (compared[f], n) for f, n in drawn.items() if n >= ENOUGH and compared[f] < OF_A_FAMILY * n}
    assert not few, f"of these kinds too few programs were compared, the others refused: {few}"
    assert compared["all"] >= COMPARED * drawn["all"], f"{compared['all']} of {drawn['all']} programs were compared"


#: The smallest programs in which the law found a fault.
FOUND = [
    """def loss_fn(p, batch):
    v = p['up'].clone()
    v.mul_(1.5)
    return F.huber_loss(p['up'], v.expand_as(p['up']), reduction='sum'), torch.tensor(4.0)
""",
]


@pytest.mark.parametrize("source", FOUND)
@pytest.mark.parametrize("layout", ["single", "tp"])
def test_what_was_found(source: str, layout: str) -> None:
    assert check(Program(source, ()), ff.Mesh(a=2), KINDS[layout]("a") | ff.Layout(unused_ok=True), 1, "none")


#: A scale by a sum of a split parameter, and an entropy over a vocabulary that does not divide.
KNOWN = """def loss_fn(p, batch):
    h = batch['x'] @ (p['up'] * p['up'].abs().mean().clamp(min=1e-5))
    logits = h @ p['down'] @ p['head']
    open_ = torch.where(logits == 0.5, float('-inf'), logits)
    return (torch.softmax(logits, -1) * open_ * p['scale'].sum()).sum(), torch.tensor(8.0)
"""


@pytest.mark.parametrize("plant", [hands_a_pending_sum_on, leaves_infinite_padding], ids=["a pending sum", "padding"])
def test_the_law_can_fail(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(KNOWN, ())
    case = (ff.Mesh(a=2), layouts.tp("a"), 1, "none")
    assert check(program, *case)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"off by|names no line|the right values are finite"):
        check(program, *case)
