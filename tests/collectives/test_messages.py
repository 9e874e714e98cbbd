"""Bad input to a collective is refused before anything is sent, and the message says what to do."""

import pytest
import torch

from fx_feather import collectives as C
from fx_feather.collectives.primitive import apply
from fx_feather.errors import FeatherError, MeshError, RankError, RuleError, ShapeError
from fx_feather.mesh import Mesh

TP = ("tp",)


def five_parts(error: pytest.ExceptionInfo[FeatherError]) -> str:
    text = str(error.value)
    assert all(part in text for part in ("got:", "problem:", "rule:", "fix:")), text
    return text


@pytest.mark.parametrize("function", [C.reduce_scatter, C.pscatter, C.pscatter_replicated])
def test_size_that_does_not_divide(function) -> None:
    with pytest.raises(ShapeError) as error:
        function(torch.ones(6, 7), TP, 3, dim=-1)
    text = five_parts(error)
    assert f"{function.__name__}(x, ('tp',), n=3, dim=-1)" in text
    assert "f32[6, 7], 3 ranks over ('tp',)" in text
    assert "dim 1 has size 7, and 7 = 2 * 3 + 1" in text
    assert "a size of 6 or 9, or pad dim 1 by 2 with zeros" in text


def test_size_smaller_than_the_ranks() -> None:
    with pytest.raises(ShapeError) as error:
        C.pscatter(torch.ones(2), TP, 4, dim=0)
    assert "a size of 4, or pad dim 0 by 2 with zeros" in five_parts(error)


def test_all_to_all_names_the_split_dim() -> None:
    with pytest.raises(ShapeError) as error:
        C.all_to_all(torch.ones(4, 3), ("cp", "tp"), 4, split_dim=1, concat_dim=0)
    text = five_parts(error)
    assert "all_to_all(x, ('cp', 'tp'), n=4, split_dim=1, concat_dim=0)" in text
    assert "dim 1 has size 3" in text


@pytest.mark.parametrize("dim", [2, -3, 1.0, "embed"])
def test_dim_that_does_not_exist(dim) -> None:
    with pytest.raises(ShapeError) as error:
        C.all_gather(torch.ones(2, 2), TP, 2, dim=dim)
    text = five_parts(error)
    assert f"dim {dim!r} is not a dim of a tensor of 2 dims" in text
    assert "dim between -2 and 1" in text


def test_scalar_has_no_dim_to_gather() -> None:
    with pytest.raises(ShapeError) as error:
        C.all_gather(torch.tensor(1.0), TP, 2, dim=0)
    assert "x.unsqueeze(0)" in five_parts(error)


def test_all_wrong_dims_at_once() -> None:
    with pytest.raises(ShapeError) as error:
        C.all_to_all(torch.ones(2), TP, 2, split_dim=5, concat_dim=6)
    text = five_parts(error)
    assert "2 problems" in text
    assert "split_dim 5" in text
    assert "concat_dim 6" in text


@pytest.mark.parametrize("n", [0, -1, None, 2.0, True])
def test_number_of_ranks_unknown(n) -> None:
    with pytest.raises(MeshError) as error:
        C.psum(torch.ones(2), TP, n)
    text = five_parts(error)
    assert f"n is {n!r}, which is not a positive integer" in text
    assert "n = mesh.count(('tp',))" in text


@pytest.mark.parametrize("axes", [(), ("tp", "tp"), ("dp,tp",), (0,), ("",)])
def test_axes_that_are_no_names(axes) -> None:
    with pytest.raises(MeshError) as error:
        C.pvary(torch.ones(2), axes, 2)
    assert f"{axes!r} is not one or more different names of mesh axes" in five_parts(error)


def test_axes_and_ranks_wrong_at_once() -> None:
    with pytest.raises(MeshError) as error:
        C.axis_index((), 0)
    text = five_parts(error)
    assert "2 problems" in text
    assert "axis_index((), n=0)" in text


@pytest.mark.parametrize(
    ("perm", "problem"),
    [
        ([(0, 1), (2, 1)], "destination 1 is named 2 times"),
        ([(0, 1), (0, 2)], "source 0 is named 2 times"),
        ([(0, 3)], "destination 3 is outside 0..2"),
        ([(-1, 0)], "source -1 is outside 0..2"),
        ([(0, 1, 2)], "[(0, 1, 2)] are not pairs (source, destination)"),
        ([0, 1], "[0, 1] are not pairs (source, destination)"),
    ],
)
def test_perm_that_is_no_permutation(perm, problem) -> None:
    with pytest.raises(MeshError) as error:
        C.ppermute(torch.ones(2), TP, 3, perm)
    text = five_parts(error)
    assert problem in text
    assert "a ring is [(i, (i + 1) % 3) for i in range(3)]" in text


def test_all_wrong_pairs_at_once() -> None:
    with pytest.raises(MeshError) as error:
        C.ppermute(torch.ones(2), TP, 3, [(0, 1), (0, 1), (5, 2)])
    text = five_parts(error)
    assert "3 problems" in text


def grad_by_transform(x: torch.Tensor) -> None:
    torch.func.grad(lambda v: C.pmax(v, TP, 1).sum())(x)


def grad_by_autograd(x: torch.Tensor) -> None:
    C.pmax(x.requires_grad_(), TP, 1).sum().backward()


@pytest.mark.parametrize("differentiate", [grad_by_transform, grad_by_autograd])
def test_gradient_through_pmax(differentiate) -> None:
    with pytest.raises(RuleError) as error:
        differentiate(torch.ones(3))
    text = five_parts(error)
    assert "pmax has no vjp, and a gradient flows through it" in text
    assert "pmax(x.detach(), ...)" in text


def test_pmax_of_a_detached_value_is_fine() -> None:
    x = torch.tensor([1.0, 3.0])
    ct = torch.func.grad(lambda v: (v * C.pmax(v.detach(), TP, 1)).sum())(x)
    torch.testing.assert_close(ct, x)


@pytest.mark.parametrize("name", [c.name for c in C.COLLECTIVES.values() if c.op is not None and c.before])
def test_no_runtime(name) -> None:
    static = {"dim": 0, "split_dim": 0, "concat_dim": 1, "perm": [0, 1]}
    static = {k: static[k] for k in C.COLLECTIVES[name].static}
    with pytest.raises(RankError) as error:
        apply(name, torch.ones(2, 2), ("dp", "tp"), 2, static)
    text = five_parts(error)
    assert "the group over axes 'dp,tp' has 2 ranks" in text
    assert "step(state, batch) under torchrun, or step.simulate(state, batch)" in text
    assert "f32[2, 2]" in text


def test_no_runtime_for_axis_index() -> None:
    with pytest.raises(RankError) as error:
        C.axis_index(TP, 2)
    assert "axis_index(('tp',), n=2, device=None)" in five_parts(error)


def test_lockstep_of_an_unknown_name() -> None:
    with pytest.raises(RuleError) as error:
        C.lockstep("all_gathr", [], Mesh(tp=1), "tp", dim=0)
    assert "did you mean 'all_gather'" in five_parts(error)


def test_lockstep_of_an_unknown_axis() -> None:
    with pytest.raises(MeshError) as error:
        C.lockstep("psum", [torch.ones(1)] * 2, Mesh(tp=2), "dp")
    assert "'dp' is not one of the axes ['tp']" in five_parts(error)


def test_lockstep_with_too_few_values() -> None:
    with pytest.raises(MeshError) as error:
        C.lockstep("psum", [torch.ones(1)], Mesh(tp=2), "tp")
    assert "1 values for 2 ranks" in five_parts(error)


def test_lockstep_with_parts_of_different_sizes() -> None:
    with pytest.raises(ShapeError) as error:
        C.lockstep("all_gather", [torch.ones(3), torch.ones(1)], Mesh(dp=2), "dp", dim=0)
    text = five_parts(error)
    assert "f32[1] on rank 1, f32[3] on rank 0" in text


def test_lockstep_with_a_size_that_does_not_divide() -> None:
    with pytest.raises(ShapeError) as error:
        C.lockstep("pscatter", [torch.ones(3)] * 2, Mesh(dp=2), "dp", dim=0)
    assert "dim 0 has size 3" in five_parts(error)
