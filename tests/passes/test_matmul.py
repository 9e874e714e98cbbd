"""Matmuls by oneDNN: the products that are worth it, each left operand laid out anew at most once, the same results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.errors import BackendError
from fx_feather.kernels import has_onednn
from fx_feather.models import llama
from fx_feather.passes import matmul
from fx_feather.record import record

aten, BY_ONEDNN = torch.ops.aten, torch.ops.fx_feather.onednn_mm.default

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no linear operator of oneDNN")


@pytest.fixture
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are worth it."""
    monkeypatch.setattr(matmul, "LEAST_WORK", 1)
    monkeypatch.setattr(matmul, "LEAST_COLUMNS", 5)


def edited(fn: Callable[..., list[Tensor]], *operands: Tensor) -> dict[object, int]:
    """How often each operator is in the graph after the pass, whose results are those of the function."""
    graph = record(fn, [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in operands]).graph
    matmul.by_onednn(graph)
    graph.lint()
    for a, b in zip(fx.GraphModule({}, graph).forward(*operands), fn(*operands), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    return {t: targets.count(t) for t in targets}


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.usefixtures("every_product")
def test_products_of_matrices_and_batches_of_one() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [x @ w, torch.bmm(x[None], w[None]).relu(), torch.bmm(b, b.mT)]

    seen = edited(fn, rows(4, 5), rows(5, 3), rows(2, 3, 4))
    assert (seen[BY_ONEDNN], seen.get(aten.mm.default), seen[aten.bmm.default]) == (2, None, 1)


@pytest.mark.usefixtures("every_product")
def test_a_left_operand_is_laid_out_once_for_all_products_that_share_it() -> None:
    def gradients(x: Tensor, q: Tensor, k: Tensor, alone: Tensor) -> list[Tensor]:
        return [x.view(8, 5).t() @ q, x.view(8, 5).t() @ k, alone.t() @ k, torch.bmm(alone.t()[None], q[None])]

    seen = edited(gradients, rows(2, 4, 5), rows(8, 3), rows(8, 2), rows(8, 6))
    # Three columns and two are worth it; two alone are not, nor are three.
    assert (seen[BY_ONEDNN], seen[aten.clone.default]) == (4, 1)
    # 160 numbers beside 40 and 100.
    logits = edited(lambda x, g: [g.t() @ x], rows(8, 5), rows(8, 20))
    assert logits[BY_ONEDNN] == 1 and aten.clone.default not in logits


@pytest.mark.usefixtures("every_product")
def test_what_onednn_would_not_take_stays() -> None:
    part = rows(5, 9)[:, 1:4]
    assert edited(lambda x, y: [x @ y], rows(4, 5), part) == {aten.mm.default: 1}


def test_small_products_and_other_dtypes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert edited(lambda x, y: [x @ y], rows(4, 5), rows(5, 3)) == {aten.mm.default: 1}
    monkeypatch.setattr(matmul, "LEAST_WORK", 60)
    assert edited(lambda x, y: [x @ y], rows(4, 5), rows(5, 3)) == {BY_ONEDNN: 1}
    wide = [rows(4, 5, dtype=torch.float64), rows(5, 3, dtype=torch.float64)]
    assert edited(lambda x, y: [x @ y], *wide) == {aten.mm.default: 1}


@needs_onednn
@pytest.mark.usefixtures("every_product")
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp_tp"])
def test_a_step_is_the_same_but_for_rounding(name: str, remat: str) -> None:
    cfg = llama.LlamaConfig(vocab=16, layers=2, embed=8, heads=4, kv_heads=2, mlp=12)
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "positions": torch.arange(6).repeat(4, 1)}
    mesh, layout = {
        "single": (ff.Mesh(), ff.Layout()),
        "ddp": (ff.Mesh(dp=2), layouts.ddp("dp")),
        "fsdp_tp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp")),
    }[name]

    def trained(kind: str, simulate: bool = True) -> list[Tensor]:
        step = ff.compile_step(
            llama.loss(cfg),
            ff.sgd(0.1, momentum=0.9),
            template=llama.template(cfg),
            mesh=mesh,
            layout=layout,
            batch=batch,
            accumulate=2,
            device="cpu",
            remat=remat,
            matmul=kind,
        )
        made = {n.target for f in step.program.funcs() for n in f.graph.nodes}
        assert (BY_ONEDNN in made) == (kind == "onednn")
        state, _ = (step.simulate if simulate else step)(step.init(0), batch)
        return tree.leaves((state.params, state.opt))

    got = trained("onednn")
    for path, (a, b) in enumerate(zip(got, trained("aten"), strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, path=path: f"leaf {path}: {m}")
    if name == "single":
        for a, b in zip(got, trained("onednn", simulate=False), strict=True):
            assert torch.equal(a, b), "a step that runs gives other bits than one that is simulated"


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul.check_matmul("aten", "cuda")
    with pytest.raises(BackendError, match="on cuda this PyTorch multiplies matrices by aten"):
        matmul.check_matmul("onednn", "cuda")
    monkeypatch.setattr(matmul, "has_onednn", lambda: False)
    with pytest.raises(BackendError, match="on cpu this PyTorch multiplies matrices by aten") as error:
        matmul.check_matmul("onednn", "cpu")
    assert str(error.value).endswith("matmul='aten'")
    settings = {"template": {}, "mesh": ff.Mesh(), "layout": ff.Layout(), "batch": {}}
    wrong = {"accumulate": 0, "reshard": "no", "matmul": "cublas"}
    with pytest.raises(ff.FeatherError, match="3 problems") as error:
        ff.compile_step(lambda params, batch: None, ff.sgd(0.1), **settings, **wrong)
    assert "matmul is 'cublas'" in str(error.value) and "the ways are aten, onednn" in str(error.value)
