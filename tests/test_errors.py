"""Bad input, case by case: each is refused by name, where it comes in, with what was wrong and what mends it."""

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import data, errors, tree
from fx_feather.models import llama
from fx_feather.passes import reshard
from fx_feather.spec import assemble, shard

PARTS = ("got:", "problem:", "rule:", "fix:")
HERE = Path(__file__).name
PACKAGE = Path(ff.__file__).parent

LIBRARY = torch.library.Library("test_errors", "DEF")
LIBRARY.define("twist(Tensor x) -> Tensor")
LIBRARY.impl("twist", lambda x: x.flip(-1), "CompositeExplicitAutograd")
torch.library.register_fake("test_errors::twist", lambda x: torch.empty_like(x), lib=LIBRARY)
for name in ("row_wise", "one_dim"):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"test_errors::{name}", lambda x: torch.empty_like(x), lib=LIBRARY)

TEMPLATE = {"down": ff.Param("mlp embed", (8, 4)), "up": ff.Param("embed mlp", (4, 8))}
TP, DP = ff.Mesh(tp=2), ff.Mesh(dp=2)
SPLIT = ff.Layout(compute={"mlp": "tp"})
CROSSED = ff.Layout(compute={"mlp": "a", "embed": "b"})
BATCH_SPLIT = ff.Layout(compute={"batch": "dp"})


def example(rows: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 4), "weight": torch.ones(rows)}


NAMES = {"x": "batch embed", "weight": "batch"}


def mlp(params: Any, batch: Any) -> torch.Tensor:
    return torch.relu(batch["x"] @ params["up"]) @ params["down"]


def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (mlp(params, batch).square().sum(1) * batch["weight"]).sum(), (batch["weight"] != 0).sum()


def compiled(fn: Any = mlp, **changes: Any) -> ff.Compiled:
    given = {
        "template": TEMPLATE,
        "mesh": TP,
        "layout": SPLIT,
        "batch": example(),
        "batch_dims": NAMES,
        "device": "cpu",
    }
    return ff.compile(fn, **{**given, **changes})


def stepped(fn: Any = loss, optimizer: Any = None, **changes: Any) -> ff.Step:
    given = {
        "template": TEMPLATE,
        "mesh": ff.Mesh(),
        "layout": ff.Layout(),
        "batch": example(),
        "batch_dims": NAMES,
        "device": "cpu",
    }
    return ff.compile_step(fn, optimizer or ff.sgd(lr=0.1), **{**given, **changes})


def model(**changes: Any) -> Callable[..., Any]:
    """Compiles a Llama of one block; sizes, layout and mesh may be changed."""
    sizes = {"vocab": 16, "layers": 1, "embed": 8, "heads": 4, "kv_heads": 4, "head_dim": 2, "mlp": 16}

    def call(mesh: ff.Mesh, layout: ff.Layout, rows: int = 4, seq: int = 4) -> None:
        cfg = llama.LlamaConfig(**{**sizes, **changes})
        batch = {name: torch.zeros(rows, seq, dtype=torch.long) for name in ("tokens", "targets", "positions")}
        ff.compile(llama.loss(cfg), template=llama.template(cfg), mesh=mesh, layout=layout, batch=batch, device="cpu")

    return call


def one(
    fn: Callable[[torch.Tensor], Any], dims: str, shape: tuple[int, ...], layout: ff.Layout, mesh: ff.Mesh = TP
) -> None:
    """Compiles a function of one parameter."""
    template, batch = {"w": ff.Param(dims, shape)}, torch.ones(2)
    ff.compile(
        lambda p, b: fn(p["w"]), template=template, mesh=mesh, layout=layout, batch=batch, batch_dims="_", device="cpu"
    )


def simulated_step(change: Callable[[ff.Step, ff.State, dict[str, torch.Tensor]], Any]) -> None:
    """Takes a step after `change(step, state, batch)`, which may return the state and batch to take it with."""
    step = stepped()
    state, batch = step.init(), example()
    state, batch = change(step, state, batch) or (state, batch)
    step.simulate(state, batch)


def used_twice() -> None:
    step = stepped()
    state, batch = step.init(), step.shard(example())
    step(state, batch)
    step(state, batch)


def twice_without_a_name(params: Any, batch: Any) -> Any:
    scale = params["up"].sum()
    return ff.block(lambda x: x * scale)(batch["x"])


def region(f: Any, in_specs: Any = None, out_specs: Any = None, size: int = 4) -> None:
    specs = {"in_specs": in_specs or ff.P("tp"), "out_specs": out_specs or ff.P()}
    ff.shard_map(f, mesh=TP, **specs)(torch.ones(size))


@dataclasses.dataclass(frozen=True)
class Case:
    """A mistake: what is called, the type of the error, and what its message has to say."""

    name: str
    call: Callable[[], Any]
    error: type[errors.FeatherError]
    says: tuple[str, ...]


def case(name: str, error: type[errors.FeatherError], call: Callable[[], Any], *says: str) -> Case:
    return Case(name, call, error, says)


E = errors
CASES = [
    # Layouts, specs and meshes.
    case(
        "unknown dim name", E.LayoutError, lambda: compiled(layout=ff.Layout(compute={"mpl": "tp"})),
        "layout row 'mpl' -> ('tp',)", "has a dim 'mpl'", "did you mean 'mlp'",
    ),
    case(
        "unknown dim name in an override", E.LayoutError,
        lambda: compiled(layout=ff.Layout(overrides={"*up*": ff.Layout(compute={"embd": "tp"})})),
        "'embd'", "did you mean 'embed'",
    ),
    case(
        "axis used twice in a spec", E.SpecError,
        lambda: ff.P("dp", "dp"), "P('dp', 'dp')", "axis 'dp' is used 2 times",
    ),
    case("axis split and partial", E.SpecError, lambda: ff.P("tp", partial="tp"), "axis 'tp' is used 2 times"),
    case(
        "axis used twice in a row", E.LayoutError, lambda: ff.Layout(compute={"mlp": ("tp", "dp", "tp")}),
        "Layout(compute=...)", "mlp -> ('tp', 'dp', 'tp')", "'mlp': ('tp', 'dp')",
    ),
    case(
        "axis used twice by a composition", E.LayoutError, lambda: layouts.fsdp("dp") | layouts.ddp("dp"),
        "batch -> ('dp', 'dp')", "axis 'dp' is used 2 times for dim 'batch'",
    ),
    case(
        "unknown axis", E.LayoutError, lambda: compiled(layout=ff.Layout(compute={"mlp": "tpp"})),
        "'tpp' is not one of the axes ['tp']", "did you mean 'tp'",
    ),
    case(
        "a layout that was not called", E.LayoutError, lambda: compiled(layout=layouts.tp),
        "layout is <function tp", "layout=layouts.tp(...)",
    ),
    case("a mesh that is none", E.MeshError, lambda: compiled(mesh=4), "mesh is 4", "ff.Mesh(dp=4)"),
    case("mesh of size 0", E.MeshError, lambda: ff.Mesh(dp=0, tp=2), "Mesh(dp=0, tp=2)", "axis 'dp' has size 0"),
    case("mesh of size 1.5", E.MeshError, lambda: ff.Mesh(dp=1.5), "1.5, which is not a positive integer"),
    case(
        "axis of a mesh", E.MeshError,
        lambda: ff.Mesh(dp=2)["dpp"], "'dpp' is not one of the axes ['dp']", "did you mean 'dp'",
    ),
    case("rank of a mesh", E.MeshError, lambda: ff.Mesh(dp=2).coords(2), "rank 2 is outside 0..1"),
    # Sizes.
    case(
        "sizes that do not divide, all at once", E.ShapeError,
        lambda: model(heads=6, kv_heads=6, mlp=10)(ff.Mesh(tp=4), layouts.tp("tp")),
        "problems:", "(heads) has size 6, axis 'tp' has size 4", "(mlp) has size 10", "(kv_heads) has size 6",
        "mlp of size 8 or 12", "heads of size 4 or 8", "params['layers'][0]",
    ),
    case(
        "kv heads that neither divide the tensor-parallel ranks nor are divided by them", E.ShapeError,
        lambda: model(heads=6, kv_heads=3)(ff.Mesh(tp=2), layouts.tp("tp")),
        "(kv_heads) has size 3, axis 'tp' has size 2", "kv_heads of size 2 or 4",
    ),
    case(
        "batch that does not divide", E.ShapeError, lambda: compiled(mesh=DP, layout=BATCH_SPLIT, batch=example(5)),
        "2 problems", "batch['x']", "batch['weight']", "dim 0 (batch) has size 5, axis 'dp' has size 2", "4 or 6",
    ),
    case(
        "batch over two axes", E.ShapeError,
        lambda: compiled(mesh=ff.Mesh(r=2, s=2), layout=layouts.hsdp("r", "s"), batch=example(6)),
        "dim 0 (batch) has size 6, axes ['r', 's'] have size 4", "4 or 8",
    ),
    case(
        "sequence that does not divide", E.ShapeError, lambda: model()(ff.Mesh(tp=2), layouts.tp_sp("tp"), seq=5),
        "(residual_seq) has size 5, axis 'tp' has size 2", "4 or 6", "/models/",
    ),
    case(
        "microbatches that do not divide", E.ShapeError, lambda: stepped(accumulate=3),
        "accumulate=3", "dim 0 (batch) has size 4, in 3 microbatches", "a batch of 3 or 6",
    ),
    case(
        "ranks that do not divide a microbatch", E.ShapeError,
        lambda: stepped(mesh=ff.Mesh(dp=4), layout=BATCH_SPLIT, accumulate=2),
        "a microbatch, a batch being 2 of them, of batch['x']", "has size 2, axis 'dp' has size 4",
    ),
    # Operators.
    case(
        "operator without a rule", E.RuleError,
        lambda: one(lambda w: torch.ops.test_errors.twist(w), "mlp embed", (8, 4), SPLIT),
        "test_errors::twist", HERE, "f32[8@tp, 4]", 'ff.rule("test_errors::twist", "!a !b -> !a !b")',
    ),
    case(
        "operator in place on what comes from outside", E.FeatherError,
        lambda: one(lambda w: w.mul_(2), "mlp", (8,), ff.Layout()),
        "aten::mul_", HERE, "a write to p['w']", "in place", "a traced function is pure", "(mul)",
    ),
    case(
        "split of an embed dim on both sides", E.AmbiguousError,
        lambda: one(lambda w: w @ w, "mlp embed", (4, 4), CROSSED, ff.Mesh(a=2, b=2)),
        HERE, "w @ w", "f32[4@a, 4@b]",
    ),
    case(
        "view of a split dim that does not divide", E.AmbiguousError,
        lambda: one(lambda w: w.view(3, 4), "mlp", (12,), SPLIT), HERE, "f32[12@tp]", "equal parts",
    ),
    case(
        "merge under a split minor dim", E.AmbiguousError,
        lambda: one(lambda w: w.flatten(), "embed mlp", (3, 8), SPLIT), HERE, "f32[3, 8@tp]", "only the major part",
    ),
    case(
        "constrain with too few names", E.SpecError, lambda: ff.constrain(torch.ones(2, 3), "batch"),
        "1 names for 2 dims", 'constrain(x, "batch _")',
    ),
    case(
        "constrain with a name twice", E.SpecError, lambda: ff.constrain(torch.ones(2, 3), "embed embed"),
        "'embed' is named twice", "write _ for one of the two",
    ),
    case(
        "constrain that does not divide", E.ShapeError,
        lambda: one(lambda w: ff.constrain(w * 1, "mlp"), "_", (5,), SPLIT),
        "constrain(x, 'mlp') at", HERE, "has size 5", "4 or 6",
    ),
    case(
        "block that closes over a value", E.FeatherError, lambda: compiled(twice_without_a_name),
        HERE, "x * scale", "pass the tensor to the block as an argument",
    ),
    case(
        "branch on a value", E.FeatherError,
        lambda: compiled(lambda p, b: b["x"] if b["x"].sum() > 0 else -b["x"]),
        HERE, "torch.where",
    ),
    # Rules.
    case(
        "rule with two arrows", E.RuleError,
        lambda: ff.rule("mm", "a b -> b -> a"), "2 arrows", "operands -> results",
    ),
    case("rule with a bad factor", E.RuleError, lambda: ff.rule("mm", "a 2b -> a"), "'2b' is not a factor"),
    case(
        "rule of an unknown operator", E.RuleError,
        lambda: ff.rule("mylib::scale", "a -> a"), "no operator 'mylib::scale'",
    ),
    case(
        "rule linear in a missing operand", E.RuleError,
        lambda: ff.rule("mm", "a b, b c -> a c", linear="2"), "0 to 1",
    ),
    case(
        "rule for another number of dims", E.RuleError,
        lambda: [
            ff.rule("test_errors::one_dim", "a -> a"),
            one(lambda w: torch.ops.test_errors.one_dim(w), "mlp embed", (8, 4), SPLIT),
        ],
        "1 dims in the pattern, 2 in the operand", "begin the operand with ...",
    ),
    # Batches.
    case(
        "example that is no tensor", E.ShapeError, lambda: compiled(batch={"x": 3, "weight": torch.ones(4)}),
        "leaf batch['x']", "3 is not a tensor", "torch.as_tensor",
    ),
    case(
        "batch_dims with too few names", E.ShapeError, lambda: compiled(batch_dims={"x": "batch", "weight": "batch"}),
        "leaf batch['x']", "1 names for 2 dims", "'batch _'",
    ),
    case(
        "batch_dims of another structure", E.ShapeError, lambda: compiled(batch_dims={"x": "batch embed"}),
        "batch_dims", "the batch has the leaves [\"['weight']\", \"['x']\"]",
    ),
    case(
        "batch of the wrong shape and dtype, all at once", E.BatchError,
        lambda: simulated_step(lambda s, t, b: (t, {"x": torch.ones(2, 4), "weight": torch.ones(4).long()})),
        "2 problems", "leaf batch['x']", "f32[2, 4] is not f32[4, 4]", "leaf batch['weight']", "i64[4] is not f32[4]",
    ),
    case(
        "batch with a missing and an extra leaf, and a wrong one", E.BatchError,
        lambda: simulated_step(lambda s, t, b: (t, {"x": torch.ones(3, 4), "mask": torch.ones(4)})),
        "missing [\"['weight']\"], unknown [\"['mask']\"]", "2 problems", "f32[3, 4] is not f32[4, 4]",
    ),
    case(
        "batch leaf that is no tensor", E.BatchError,
        lambda: simulated_step(lambda s, t, b: (t, {**b, "x": [1.0]})), "batch",
    ),
    case(
        "batch to shard", E.BatchError,
        lambda: stepped().shard(example(8)), "shard(batch)", "f32[8, 4] is not f32[4, 4]",
    ),
    # Losses.
    case(
        "loss that is a mean", E.ShapeError,
        lambda: stepped(lambda p, b: loss(p, b)[0] / 4), "got:     f32[]\n", "nll.sum(), valid.sum()",
    ),
    case(
        "loss that is not a scalar", E.ShapeError,
        lambda: stepped(lambda p, b: (mlp(p, b), b["weight"].sum())), "(f32[4, 4], f32[])",
    ),
    case(
        "loss of integers", E.ShapeError,
        lambda: stepped(lambda p, b: (b["weight"].sum().long(),) * 2), "(i64[], i64[])", "floating point",
    ),
    case(
        "loss with a Python count", E.ShapeError,
        lambda: stepped(lambda p, b: (loss(p, b)[0], 4)), "(f32[], int)", "(sum, count)",
    ),
    case(
        "loss of four results", E.ShapeError,
        lambda: stepped(lambda p, b: (*loss(p, b), {}, {})), "(f32[], i64[], dict, dict)",
    ),
    case(
        "Python number in aux", E.ShapeError, lambda: stepped(lambda p, b: (*loss(p, b), {"n": 3})),
        "int", "3 is not a tensor", "torch.as_tensor",
    ),
    case("Python number as a result", E.ShapeError, lambda: compiled(lambda p, b: {"n": 1.5}), "1.5 is not a tensor"),
    # States.
    case("a state used twice", E.StateError, used_twice, "after step 0", "given to an earlier step already"),
    case(
        "state of another optimizer", E.ShapeError,
        lambda: simulated_step(lambda s, t, b: (stepped(optimizer=ff.adamw(lr=0.1)).init(), b)),
        "state.opt", "leaves",
    ),
    case(
        "parameters of the wrong shape and dtype, all at once", E.ShapeError,
        lambda: compiled().simulate({"up": torch.ones(4, 8).double(), "down": torch.ones(4, 8)}, example()),
        "params['down'] and 1 more", "params['up'] is f64[4, 8], not f32[4, 8]", "not f32[8, 4]",
    ),
    case(
        "parameters with a leaf missing", E.ShapeError,
        lambda: compiled().simulate({"up": torch.ones(4, 8)}, example()),
        "['down']",
    ),
    case(
        "a mesh in a plain process", E.MeshError,
        lambda: stepped(mesh=DP, layout=BATCH_SPLIT).shard(example()),
        "1 process\n", "the mesh has 2 ranks, the world has 1", "torchrun --nproc-per-node 2",
    ),
    # Parameters.
    case(
        "template of tensors", E.ShapeError, lambda: compiled(template={"up": torch.ones(4, 8), "down": 3}),
        "2 problems", "template['up'] is not a Param", "template['down']",
    ),
    case("Param with too few names", E.ShapeError, lambda: ff.Param("embed", (4, 8)), "1 dim names for 2 dims"),
    case("Param with a name twice", E.ShapeError, lambda: ff.Param("embed embed", (4, 4)), "'embed' names 2 dims"),
    case("Param of a bad shape", E.ShapeError, lambda: ff.Param("embed", (-1,)), "integers of at least 0"),
    case("Param with an init not called", E.ShapeError, lambda: ff.Param("embed", (4,), ff.zeros), "is not called"),
    # Optimizers and settings.
    case("negative rate", E.OptimizerError, lambda: ff.adamw(lr=-1.0, b1=2.0), "2 problems", "lr is -1.0", "b1 is 2.0"),
    case("negative norm", E.OptimizerError, lambda: ff.clip_by_global_norm(-1), "max_norm is -1"),
    case("schedule whose warm-up is too long", E.OptimizerError, lambda: ff.warmup_cosine(1.0, 10, 5), "warmup_steps"),
    case("schedule with a decay of no steps", E.OptimizerError, lambda: ff.wsd(1.0, 2, 10, 0), "wsd(", "decay is 0"),
    case("chain of what is no transform", E.OptimizerError, lambda: ff.chain(ff.adamw), "argument 0"),
    case(
        "optimizer that is none", E.OptionError,
        lambda: stepped(optimizer=ff.adamw), "optimizer is <function adamw", "ff.adamw(lr=",
    ),
    case(
        "settings of a step, all at once", E.OptionError,
        lambda: stepped(accumulate=0, remat="half", bucket_bytes=0),
        "3 problems", "accumulate is 0", "remat is 'half'", "bucket_bytes is 0", "remat='none'",
    ),
    case(
        "adjusting by statistics that the loss has not", E.OptionError,
        lambda: stepped(adjust=lambda params, aux: params), "no auxiliary values", "return (sum, count, aux)",
    ),
    case(
        "pipeline, which is not there", E.LayoutError,
        lambda: stepped(mesh=ff.Mesh(pp=2), layout=ff.Layout(compute={"layers": "pp"})), "'layers'", "'pp'",
    ),
    # Parts and wholes.
    case(
        "conversion between different shapes", E.SpecError,
        lambda: reshard.steps(ff.Type.whole(torch.ones(4)), ff.Type.whole(torch.ones(5)), TP), "f32[4]", "f32[5]",
    ),
    case(
        "whole value of another shape", E.ShapeError,
        lambda: shard(torch.ones(4), ff.Type(torch.float32, (6,), (("tp",),)), TP, 0), "[4] is not [6]",
    ),
    case(
        "parts of different sizes", E.ShapeError,
        lambda: assemble([torch.ones(3), torch.ones(1)], ff.Type(torch.float32, (4,), (("tp",),)), TP),
        "rank 0 holds [3]; rank 1 holds [1]", "each of 2 ranks must hold [2]",
    ),
    case(
        "too few parts", E.ShapeError,
        lambda: assemble([torch.ones(2)], ff.Type(torch.float32, (4,), (("tp",),)), TP), "1 parts on Mesh(tp=2)",
    ),
    case(
        "spec of too many dims", E.SpecError,
        lambda: ff.P("a", "b").padded(1), "the spec names 2 dims, the tensor has 1",
    ),
    case("spec with a number", E.SpecError, lambda: ff.P(0, "tp"), "P(0, 'tp')", "0 is no name of a mesh axis"),
    # Data.
    case("missing data", E.DataError, lambda: data.source_text("/no/such/file"), "/no/such/file", "no file or folder"),
    case("too short a text", E.DataError, lambda: data.Batches(b"abc", 1, 8), "3 bytes", "less than 9"),
    # Manual regions.
    case(
        "collective outside of a region", E.MeshError,
        lambda: ff.psum(torch.ones(2), "tp"), "ff.psum(x, 'tp')", "shard_map",
    ),
    case(
        "unknown axis in a region", E.MeshError,
        lambda: region(lambda x: ff.psum(x, "dp")), "'dp' is not one of the axes ['tp']",
    ),
    case(
        "result that varies", E.TypeStateError, lambda: region(lambda x: x * 2),
        "out_specs P() does not name ['tp']", "ff.psum(..., 'tp')",
    ),
    case(
        "sum of what is the same everywhere", E.TypeStateError,
        lambda: region(lambda x: ff.psum(ff.psum(x, "tp"), "tp")), HERE, "it is invariant over ['tp']", "drop the psum",
    ),
    case(
        "region over a size that does not divide", E.ShapeError,
        lambda: region(lambda x: x, size=5), "dim 0 has size 5",
    ),
    case(
        "region with too many specs", E.SpecError,
        lambda: region(lambda x: x, (ff.P(), ff.P())), "2 specs for 1 tensors",
    ),
    case("region with a spec of too many dims", E.SpecError, lambda: region(lambda x: x, ff.P(None, "tp")), "2 dims"),
    case(
        "collective over a local size that does not divide", E.ShapeError,
        lambda: region(lambda x: ff.reduce_scatter(x, "tp", dim=0), size=6), "dim 0 has size 3",
    ),
    case("collective over no name", E.MeshError, lambda: region(lambda x: ff.psum(x, 3)), "3 is not one of the axes"),
    case("collective of a number", E.ShapeError, lambda: region(lambda x: ff.psum(3.0, "tp")), "3.0 is not a tensor"),
    case("region that returns a number", E.ShapeError, lambda: region(lambda x: 3), "a result of type int"),
    case(
        "region without a mesh", E.MeshError,
        lambda: ff.shard_map(lambda x: x, mesh=2, in_specs=ff.P(), out_specs=ff.P()), "2 is not a Mesh",
    ),
    case(
        "collective over a dim that the local value lacks", E.ShapeError,
        lambda: region(lambda x: ff.all_gather(x, "tp", dim=2)),
        "ff.all_gather(x, 'tp', dim=2)", "dim 2 is not a dim of a tensor of 1 dims", "between -1 and 0",
    ),
]  # fmt: skip


def check_parts(error: BaseException) -> str:
    text = str(error)
    assert all(part in text for part in PARTS), text
    assert not any(word in text for word in ("Traceback", "torch/", "FakeTensor", "Proxy(")), text
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name.replace(" ", "-"))
def test_mistake(case) -> None:
    with pytest.raises(errors.FeatherError) as caught:
        case.call()
    text = check_parts(caught.value)
    assert type(caught.value) is case.error, text
    for words in case.says:
        assert words in text, text
    raised_in = Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename)
    assert raised_in.is_relative_to(PACKAGE), f"raised in {raised_in}"


def test_there_are_many_cases() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 45


def test_an_empty_file(tmp_path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(E.DataError) as caught:
        data.source_text(empty)
    assert "0 bytes of text" in check_parts(caught.value)


AMBIGUOUS = {
    # Two operands split on different dims: either may be gathered.
    "add": (lambda a, b: a + b, "mlp embed", "embed mlp", (4, 4), (4, 4), 2),
    "mul": (lambda a, b: a * b, "_ mlp", "mlp _", (4, 4), (4, 4), 2),
    # A product whose two free dims are split by one axis.
    "matmul": (lambda a, b: a @ b, "mlp _", "_ mlp", (4, 6), (6, 4), 2),
    # The dim that is joined has to be whole, and the other one doesn't.
    "cat": (lambda a, b: torch.cat([a, b]), "_ mlp", "mlp _", (4, 4), (4, 4), 1),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_each_suggestion_of_an_ambiguous_operator_works(name) -> None:
    op, left, right, left_shape, right_shape, fixes = AMBIGUOUS[name]
    template = {"a": ff.Param(left, left_shape), "b": ff.Param(right, right_shape)}

    def compiled_with(edits: dict[str, str]) -> ff.Compiled:
        def fn(p: Any, batch: Any) -> torch.Tensor:
            a, b = p["a"] * 2, p["b"] * 3
            a = ff.constrain(a, edits["a"]) if "a" in edits else a
            b = ff.constrain(b, edits["b"]) if "b" in edits else b
            return op(a, b)

        return ff.compile(
            fn, template=template, mesh=TP, layout=SPLIT, batch=torch.ones(2), batch_dims="_", device="cpu"
        )

    with pytest.raises(E.AmbiguousError) as caught:
        compiled_with({})
    text = check_parts(caught.value)
    assert f"{HERE}:{op.__code__.co_firstlineno}: " in text
    assert "made at" in text and 'a, b = p["a"] * 2, p["b"] * 3' in text
    assert "on Mesh(tp=2)" in text
    assert "(each was tried)" in text
    got = text.split("got:")[1].split("problem:")[0]
    operands = [s.split(":")[0].strip() for s in got.strip().splitlines()[:2]]
    assert all("@tp" in s and "f32[" in s for s in got.strip().splitlines()[:2]), text
    suggestions = [s.strip().removeprefix("or ") for s in text.split("fix:")[1].splitlines() if "ff.constrain(" in s]
    assert len(suggestions) == fixes, text
    params = ff.init(template)
    for suggestion in suggestions:
        target, dims = suggestion.split(" = ")[0], suggestion.split('"')[1]
        f = compiled_with({"ab"[operands.index(target)]: dims})
        torch.testing.assert_close(f.simulate(params, torch.ones(2)), op(params["a"] * 2, params["b"] * 3))


def test_a_pattern_of_the_suggested_kind_mends_an_unruled_operator() -> None:
    ff.rule("test_errors::row_wise", "a !b -> a !b")
    w = ff.Param("mlp embed", (8, 4))
    f = ff.compile(
        lambda p, b: torch.ops.test_errors.row_wise(p["w"]),
        template={"w": w},
        mesh=TP,
        layout=SPLIT,
        batch=torch.ones(2),
        batch_dims="_",
        device="cpu",
    )
    assert repr(f.out_types) == "f32[8@tp, 4]"


def test_inputs_are_called_as_the_function_calls_them() -> None:
    def half(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return weights["in"][0] + x

    def fn(params: Any, batch: Any) -> Any:
        return ff.block(half)({"in": [params["a"]]}, params["b"])

    template = {"a": ff.Param("mlp _", (4, 4)), "b": ff.Param("_ mlp", (4, 4))}
    with pytest.raises(E.AmbiguousError) as caught:
        ff.compile(fn, template=template, mesh=TP, layout=SPLIT, batch=torch.ones(2), batch_dims="_", device="cpu")
    text = check_parts(caught.value)
    assert "weights['in'][0]: f32[4@tp, 4]" in text and "x: f32[4, 4@tp]" in text
    assert "weights['in'][0] = ff.constrain(weights['in'][0], \"_ _\")" in text
    with pytest.raises(E.RuleError) as caught:
        one(lambda w: torch.ops.test_errors.twist(w), "mlp embed", (8, 4), SPLIT)
    assert "p['w']: f32[8@tp, 4] (mlp embed)" in check_parts(caught.value)


@pytest.mark.parametrize("real", [True, False], ids=["run", "simulate"])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(real) -> None:
    step = stepped()
    state, good = step.init(), example()
    before = [x.clone() for x in tree.leaves((state.params, state.opt))]
    take = (lambda s, b: step(s, step.shard(b))) if real else step.simulate
    bad = {"x": torch.ones(4, 4), "weight": torch.tensor([1.0, float("nan"), 1.0, 1.0])}
    with pytest.raises(E.NonFiniteError) as caught:
        take(state, bad)
    text = check_parts(caught.value)
    assert "step 0" in text and "loss nan" in text
    assert "first leaf with a gradient that is not finite: params['down'] (and 1 more)" in text
    with pytest.raises(E.NonFiniteError) as caught:
        take(state, {"x": torch.ones(4, 4), "weight": torch.zeros(4)})
    assert "the count is 0: no element of the batch counts" in check_parts(caught.value)
    assert all(torch.equal(x, y) for x, y in zip(before, tree.leaves((state.params, state.opt)), strict=True))
    state, metrics = take(state, good)
    assert state.step == 1 and metrics["count"] == 4
