"""Patterns: what they mean for a call, and what is said about those that mean nothing."""

import pytest
import torch

from fx_feather.errors import RuleError
from fx_feather.mesh import Mesh
from fx_feather.rules import RULES, Conflict, OpCall, Operand, lookup, rule, solve
from fx_feather.rules.pattern import parse
from fx_feather.spec import Type

aten = torch.ops.aten


def call(target: object, *shapes: tuple[int, ...], outs: list[tuple[int, ...]]) -> OpCall:
    operands = tuple(Operand(i, s, torch.float32) for i, s in enumerate(shapes))
    return OpCall(target, operands, {}, operands, tuple(Operand(i, s, torch.float32) for i, s in enumerate(outs)))


def typed(shape: tuple[int, ...], *dims: tuple[str, ...], **more: frozenset[str]) -> Type:
    return Type(torch.float32, shape, dims + ((),) * (len(shape) - len(dims)), **more)


def test_leading_dims_are_aligned_right():
    s = parse("... m k, ... k n -> ... m n")(call(None, (2, 3, 4, 5), (3, 5, 6), outs=[(2, 3, 4, 6)]))
    assert s.operands == ((("...0",), ("...1",), ("m",), ("k",)), (("...1",), ("k",), ("n",)))
    assert s.results == ((("...0",), ("...1",), ("m",), ("n",)),)


def test_a_dim_of_size_1_has_no_part_in_a_larger_factor():
    s = parse("b d, b d -> b d")(call(None, (1, 4), (3, 4), outs=[(3, 4)]))
    assert s.operands == (((), ("d",)), (("b",), ("d",)))
    assert s.sizes == {"b": 3, "d": 4}


def test_sizes_of_compound_factors_come_from_the_other_side():
    s = parse("b (h k) -> b h k")(call(None, (2, 12), outs=[(2, 3, 4)]))
    assert s.operands == ((("b",), ("h", "k")),)
    assert s.sizes == {"b": 2, "h": 3, "k": 4}


def test_whole_and_linear():
    s = parse("b !d, !d -> b !d", "0|0,1")(call(None, (2, 3), (3,), outs=[(2, 3)]))
    assert s.whole == {"d"}
    assert s.linear == (frozenset({0}), frozenset({0, 1}))


@pytest.mark.parametrize(
    ("pattern", "linear", "problem"),
    [
        ("m k, k n", "", "0 arrows"),
        ("m -> m -> m", "", "2 arrows"),
        ("m %, k n -> m n", "", "'%' is not a factor"),
        ("m () -> m", "", "'()' is not a factor"),
        ("m (h 2) -> m", "", "'2' is not a factor"),
        ("m k, k n -> m n", "0|2", "'2' is not the number of an operand"),
        ("m k, k n -> m n", "x", "'x' is not the number of an operand"),
    ],
)
def test_a_pattern_that_is_not_well_formed_is_refused(pattern: str, linear: str, problem: str):
    with pytest.raises(RuleError) as e:
        rule("mm.default", pattern, linear=linear)
    assert f"problem: {problem}" in str(e.value)
    assert repr(pattern) in str(e.value)


@pytest.mark.parametrize("name", ["nothing_like_it", "mm.nothing_like_it", "nowhere::mm"])
def test_an_operator_that_does_not_exist_is_refused(name: str):
    with pytest.raises(RuleError, match=f"torch has no operator '{name}'"):
        rule(name, "a -> a")


def test_a_call_that_the_pattern_does_not_fit_is_refused():
    shard = parse("m k, k n -> m n")
    with pytest.raises(RuleError, match="the pattern has 2 operands and 1 results"):
        shard(call("mm", (2, 3), outs=[(2, 3)]))
    with pytest.raises(RuleError, match="2 dims in the pattern, 3 in the operand"):
        shard(call("mm", (2, 3, 4), (3, 4), outs=[(2, 4)]))


def test_a_rule_of_ones_own_is_looked_up():
    lib = torch.library.Library("feather_test", "FRAGMENT")
    lib.define("scale(Tensor x, Tensor by) -> Tensor")
    op = torch.ops.feather_test.scale.default
    rule("feather_test::scale", "b d, d -> b d", linear="0|1")
    try:
        c = call(op, (4, 6), (6,), outs=[(4, 6)])
        found = lookup(c)
        assert found is not None
        out = solve(found.shard(c), [typed((4, 6), ("dp",), ("tp",)), typed((6,))], Mesh(dp=2, tp=2))
        assert out.targets[1].dims == (("tp",),)
        assert out.targets[1].replicated == {"dp"}
        assert out.results[0].dims == (("dp",), ("tp",))
    finally:
        del RULES[op]


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.mul_.Tensor, aten.zero_.default, aten.bernoulli.default])
def test_what_writes_in_place_or_is_random_has_no_rule(op: object):
    assert lookup(call(op, (2, 3), (2, 3), outs=[(2, 3)])) is None


def test_a_summed_factor_leaves_a_partial_result():
    c = call(aten.mm.default, (4, 6), (6, 8), outs=[(4, 8)])
    found = lookup(c)
    assert found is not None
    out = solve(found.shard(c), [typed((4, 6), (), ("tp",)), typed((6, 8))], Mesh(tp=2))
    assert out.targets[1].dims == (("tp",), ())
    assert out.results[0].partial == {"tp"}


def test_a_pending_sum_passes_only_through_what_is_linear_in_it():
    mesh, pending = Mesh(tp=2), typed((4,), partial=frozenset({"tp"}))
    c = call(aten.mul.Tensor, (4,), (4,), outs=[(4,)])
    s = lookup(c).shard(c)  # type: ignore[union-attr]
    assert solve(s, [pending, typed((4,))], mesh).results[0].partial == {"tp"}
    assert solve(s, [pending, pending], mesh).results[0].partial == frozenset()
    c = call(aten.add.Tensor, (4,), (4,), outs=[(4,)])
    s = lookup(c).shard(c)  # type: ignore[union-attr]
    assert solve(s, [pending, typed((4,))], mesh).results[0].partial == frozenset()
    assert solve(s, [pending, pending], mesh).results[0].partial == {"tp"}


def test_one_axis_can_not_split_two_factors():
    c = call(aten.mm.default, (4, 6), (6, 8), outs=[(4, 8)])
    s = lookup(c).shard(c)  # type: ignore[union-attr]
    with pytest.raises(Conflict, match="axis 'tp' splits factors 'm' and 'n'") as e:
        solve(s, [typed((4, 6), ("tp",)), typed((6, 8), (), ("tp",))], Mesh(tp=2))
    assert e.value.kind == "axis"
    assert e.value.operands == [0, 1]


def test_only_the_shape_of_an_ignored_operand_counts():
    c = OpCall(
        aten.zeros_like.default,
        (Operand(0, (4, 6), torch.float32),),
        {},
        (Operand(0, (4, 6), torch.float32),),
        (Operand(0, (4, 6), torch.float32),),
    )
    s = lookup(c).shard(c)  # type: ignore[union-attr]
    given = typed((4, 6), ("dp",), partial=frozenset({"tp"}))
    out = solve(s, [given], Mesh(dp=2, tp=2))
    assert out.targets == (given,)
    assert out.results[0].dims == (("dp",), ())
    assert not out.results[0].partial
