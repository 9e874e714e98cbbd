"""Law: every collective equals its reference, its vjp is its adjoint in global semantics, and vjp of vjp is itself."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fx_feather.collectives import COLLECTIVES, Collective, executed_by, lockstep
from fx_feather.collectives.primitive import apply
from fx_feather.mesh import Mesh

NAMES = [c.name for c in COLLECTIVES.values() if c.before]
LINEAR = [name for name in NAMES if COLLECTIVES[name].vjp is not None]
COTANGENT = {"V": "V", "I": "I", "R": "partial", "partial": "R"}


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    static: dict[str, int | list[int]]
    seed: int

    @property
    def n(self) -> int:
        return self.mesh.count(self.axes)


@st.composite
def meshes(draw: st.DrawFn, most: int = 8) -> Mesh:
    sizes: dict[str, int] = {}
    for axis in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        sizes[axis] = draw(st.integers(1, most))
        most //= sizes[axis]
    return Mesh(**sizes)


@st.composite
def cases(draw: st.DrawFn, collective: Collective) -> Case:
    mesh = draw(meshes())
    axes = draw(st.permutations(mesh.axes))[: draw(st.integers(1, len(mesh.axes)))]
    n = mesh.count(tuple(axes))
    has_dim = any(k.endswith("dim") for k in collective.static)
    shape = draw(st.lists(st.integers(0, 3), min_size=int(has_dim), max_size=3))
    static: dict[str, int | list[int]] = {}
    for key in collective.static:
        if key == "perm":
            sources, destinations = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
            pairs = list(zip(sources, destinations, strict=True))[: draw(st.integers(0, n))]
            static[key] = [r for pair in pairs for r in pair]
        else:
            static[key] = draw(st.integers(0, len(shape) - 1))
    if collective.divides is not None:
        shape[static[collective.divides]] *= n
    return Case(mesh, tuple(axes), tuple(shape), static, draw(st.integers(0, 2**20)))


def random_value(state: str, shape: tuple[int, ...], case: Case, seed: int) -> list[Tensor]:
    """Values of all ranks in a state: alike within a group where the state says so, else independent."""
    generator = torch.Generator().manual_seed(case.seed * 7 + seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(case.mesh.size)]
    if state in ("I", "R"):
        for ranks in case.mesh.groups(case.axes):
            for r in ranks:
                values[r] = values[ranks[0]].clone()
    return values


def global_values(state: str, values: list[Tensor], case: Case) -> list[Tensor]:
    """What the values of each group mean: all parts, the one value that all hold, or the sum."""
    out = []
    for ranks in case.mesh.groups(case.axes):
        stacked = torch.stack([values[r] for r in ranks])
        if state in ("I", "R"):
            assert (stacked == stacked[0]).all(), f"a value in state {state} differs between ranks"
        out.append({"V": stacked, "I": stacked[0], "R": stacked[0], "partial": stacked.sum(0)}[state])
    return out


def inner(state: str, x: list[Tensor], ct_state: str, ct: list[Tensor], case: Case) -> Tensor:
    pairs = zip(global_values(state, x, case), global_values(ct_state, ct, case), strict=True)
    return torch.stack([(a * b).sum() for a, b in pairs]).sum()


def on_ranks(mesh: Mesh, work: Callable[[int], object]) -> list:
    """Runs `work(rank)` in a thread for each rank; collectives meet at a barrier and use their references."""
    here, barrier = threading.local(), threading.Barrier(mesh.size, timeout=60)
    operands: list[Tensor | None] = [None] * mesh.size
    results: list[Tensor] = []
    out: list[object] = [None] * mesh.size
    errors: list[Exception] = []

    def run(collective, x, axes, n, static):
        operands[here.rank] = x.detach()
        if barrier.wait() == 0:
            assert n == mesh.count(axes)
            results[:] = lockstep(collective.name, operands, mesh, axes, **static)
        barrier.wait()
        return results[here.rank]

    def rank_main(rank: int) -> None:
        here.rank = rank
        try:
            out[rank] = work(rank)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
            barrier.abort()

    with executed_by(run):
        threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(mesh.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    assert None not in out
    return out


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LINEAR)
@settings(deadline=None)
@given(data=st.data())
def test_vjp_is_the_adjoint(name: str, data: st.DataObject) -> None:
    c = COLLECTIVES[name]
    case = data.draw(cases(c))
    x = random_value(c.before, case.shape, case, 0)
    y = lockstep(name, x, case.mesh, case.axes, **case.static)
    ct = random_value(COTANGENT[c.after], tuple(y[0].shape), case, 1)
    x_ct = lockstep(c.vjp, ct, case.mesh, case.axes, **c.vjp_static(case.static))
    after = inner(c.after, y, COTANGENT[c.after], ct, case)
    before = inner(c.before, x, COTANGENT[c.before], x_ct, case)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LINEAR)
@settings(deadline=None)
@given(data=st.data())
def test_autograd_on_ranks_is_the_table(name: str, data: st.DataObject) -> None:
    """Forward, vjp and vjp of vjp, run by one thread a rank, equal the references of the rows that the table names."""
    c = COLLECTIVES[name]
    case = data.draw(cases(c))
    x = random_value(c.before, case.shape, case, 0)
    y = lockstep(name, x, case.mesh, case.axes, **case.static)
    ct = random_value(COTANGENT[c.after], tuple(y[0].shape), case, 1)
    x_again = random_value(c.before, case.shape, case, 2)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        static = dict(case.static)
        out, pull = torch.func.vjp(lambda v: apply(name, v, case.axes, case.n, static), x[rank])
        x_ct, pull_again = torch.func.vjp(lambda v: pull(v)[0], ct[rank])
        (out_again,) = pull_again(x_again[rank])
        return out, x_ct, out_again

    outs, x_cts, outs_again = zip(*on_ranks(case.mesh, work), strict=True)
    close(list(outs), y)
    close(list(x_cts), lockstep(c.vjp, ct, case.mesh, case.axes, **c.vjp_static(case.static)))
    close(list(outs_again), lockstep(name, x_again, case.mesh, case.axes, **case.static))


@pytest.mark.parametrize("name", LINEAR)
def test_dual_of_dual_is_the_collective(name: str) -> None:
    c = COLLECTIVES[name]
    dual = COLLECTIVES[c.vjp]
    static = {k: ([0, 1, 1, 2] if k == "perm" else i) for i, k in enumerate(c.static)}
    assert dual.vjp == name
    assert dual.vjp_static(c.vjp_static(static)) == static
    assert (dual.before, dual.after) == (COTANGENT[c.after], COTANGENT[c.before])


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_equals_the_global_function(name: str, data: st.DataObject) -> None:
    """Each result, reassembled to a whole tensor, equals the collective written on whole tensors."""
    c = COLLECTIVES[name]
    case = data.draw(cases(c))
    x = random_value(c.before, case.shape, case, 0)
    kept = [v.clone() for v in x]
    y = lockstep(name, x, case.mesh, case.axes, **case.static)
    assert all(torch.equal(a, b) for a, b in zip(x, kept, strict=True)), "the operand was changed in place"
    assert all(v.is_contiguous() for v in y)
    assert not {v.data_ptr() for v in x if v.numel()} & {v.data_ptr() for v in y if v.numel()}, "a result is an operand"
    before = [whole(c.before, [x[r] for r in g], split_before(case)) for g in case.mesh.groups(case.axes)]
    after = [whole(c.after, [y[r] for r in g], split_after(case)) for g in case.mesh.groups(case.axes)]
    close(after, [on_whole(name, v, case) for v in before])


def split_before(case: Case) -> int | None:
    return case.static.get("concat_dim", case.static.get("dim"))


def split_after(case: Case) -> int | None:
    return case.static.get("split_dim", case.static.get("dim"))


def whole(state: str, values: list[Tensor], dim: int | None) -> Tensor:
    if state == "V":
        return torch.stack(values) if dim is None else torch.cat(values, dim)
    if state == "partial":
        return torch.stack(values).sum(0)
    assert all(torch.equal(v, values[0]) for v in values), f"a value in state {state} differs between ranks"
    return values[0]


def on_whole(name: str, x: Tensor, case: Case) -> Tensor:
    if name == "pmax":
        return x.amax(0)
    if name == "ppermute":
        matrix = torch.zeros(case.n, case.n, dtype=x.dtype)
        perm = case.static["perm"]
        matrix[perm[1::2], perm[::2]] = 1
        return torch.tensordot(matrix, x, dims=([1], [0]))
    if name == "all_to_all" and split_before(case) == split_after(case):
        # Splitting and joining the same dim transposes the pieces: piece j of rank i becomes piece i of rank j.
        d, n = case.static["split_dim"], case.n
        size = x.shape[d] // (n * n)
        return x.unflatten(d, (n, n, size)).transpose(d, d + 1).reshape(x.shape)
    # All others only say in another way what is split, so the whole value stays.
    return x


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_fake_is_like_the_result(name: str, data: st.DataObject) -> None:
    c = COLLECTIVES[name]
    case = data.draw(cases(c))
    x = random_value(c.before, case.shape, case, 0)
    (real, *_) = lockstep(name, x, case.mesh, case.axes, **case.static)
    operand = x[0].to("meta")
    if operand.dim() > 1:
        operand = operand.transpose(0, 1).contiguous().transpose(0, 1)
    fake = apply(name, operand, case.axes, case.n, case.static)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    if c.op is not None:
        assert fake.is_contiguous()


@settings(deadline=None)
@given(mesh=meshes(), data=st.data())
def test_axis_index_is_the_position_in_the_mesh(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(mesh.axes)))[: data.draw(st.integers(1, len(mesh.axes)))]
    out = lockstep("axis_index", [torch.empty(0)] * mesh.size, mesh, axes)
    assert [int(i) for i in out] == [mesh.index(r, axes) for r in range(mesh.size)]
