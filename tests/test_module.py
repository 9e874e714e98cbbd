"""Models written as modules: what they compute, in any layout, is what the module itself does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fx_feather as ff
import layouts

F64 = torch.float64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False, dtype=F64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8, dtype=F64), nn.LayerNorm(8, dtype=F64)
        self.attention = Attention()
        self.up, self.down = nn.Linear(8, 16, dtype=F64), nn.Linear(16, 8, dtype=F64)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = x + self.attention(self.norm1(x)) * scale
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=F64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False, dtype=F64)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(6, 8, dtype=F64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


TRANSFORMER = {
    "embed.weight": "vocab embed",
    "*.[qkv].weight": "heads embed",
    "*.o.weight": "embed heads",
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "*.down.bias": "embed",
    "*.norm*": "embed",
}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, dtype=F64), nn.GroupNorm(2, 4, dtype=F64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=4, dtype=F64), nn.Flatten(), nn.Linear(4, 5, dtype=F64),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


CONV = {
    "net.0.weight": "mlp _ _ _", "net.0.bias": "mlp", "net.1.*": "mlp", "net.4.weight": "_ _ _ _", "net.4.bias": "_",
    "net.6.weight": "_ embed", "net.6.bias": "_",
}  # fmt: skip
LAYOUTS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "single": (ff.Mesh(), layouts.single()),
    "ddp": (ff.Mesh(dp=2), layouts.ddp("dp")),
    "fsdp": (ff.Mesh(dp=2), layouts.fsdp("dp")),
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "fsdp | tp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
}


def built(kind: str) -> tuple[nn.Module, dict[str, str], dict[str, torch.Tensor], str]:
    torch.manual_seed(0)
    if kind == "transformer":
        ids = torch.randint(0, 12, (4, 6))
        return Transformer(), TRANSFORMER, {"x": ids, "y": ids.roll(1, 1)}, "batch seq"
    x = torch.randn(4, 3, 6, 6, dtype=F64)
    return Conv(), CONV, {"x": x, "y": torch.randint(0, 5, (4,))}, {"x": "batch _ _ _", "y": "batch"}  # type: ignore[return-value]


def loss_of(apply: Any) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        logits = apply(params, batch["x"])
        return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(), reduction="sum"), torch.tensor(5.0)

    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "blocks"), [("transformer", ()), ("transformer", "layers.*"), ("conv", ())])
def test_a_module_is_itself_in_any_layout(kind: str, blocks: Any, layout: str) -> None:
    module, dims, batch, batch_dims = built(kind)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    template, apply = ff.from_module(module, dims, blocks=blocks)
    mesh, table = LAYOUTS[layout]
    step = ff.compile_step(
        loss_of(apply), ff.sgd(lr=1.0), template=template, mesh=mesh, layout=table, batch=batch, batch_dims=batch_dims
    )
    state = step.init()
    new, metrics = step.run_whole(
        ff.State({k: v.detach().clone() for k, v in module.named_parameters()}, state.opt, 0, True), batch
    )
    want = loss_of(lambda params, x: module(x))({}, batch)
    (want[0] / want[1]).backward()
    assert metrics["loss"] == pytest.approx((want[0] / want[1]).item(), rel=1e-12)
    for name, p in module.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.detach() - new.params[name], p.grad, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items()), "the module is as it was"
    assert not any("forward" in vars(m) for m in module.modules())
    module.load_state_dict(new.params, strict=False)
    assert torch.equal(module.get_parameter(name), new.params[name])


def test_its_own_values_are_the_start_in_every_layout() -> None:
    module, dims, *_ = built("transformer")
    template = ff.from_module(module, dims).template
    assert "head.weight" not in template, "a tied weight is one leaf"
    own = dict(module.named_parameters())
    assert all(torch.equal(v, own[k]) for k, v in ff.init(template, 5).items())
    half = ff.init(ff.from_module(module, dims, dtype=torch.float32).template)
    assert all(torch.equal(v, own[k].float()) for k, v in half.items())
    drawn = ff.init(ff.from_module(module, dims, init=ff.zeros()).template)
    assert all(not v.any() for v in drawn.values())


def test_layers_that_are_built_alike_are_one_function() -> None:
    module, dims, batch, batch_dims = built("transformer")

    def layers(module: nn.Module) -> int:
        template, apply = ff.from_module(module, dims, blocks="layers.*")
        step = ff.compile_step(
            loss_of(apply), ff.sgd(lr=1.0), template=template, mesh=ff.Mesh(dp=2), layout=layouts.fsdp("dp"),
            batch=batch, batch_dims=batch_dims,
        )  # fmt: skip
        return sum(f.name == "Layer.forward" for f in step.program.funcs())

    assert layers(module) == 1
    module.layers[1].norm1.eps = 1e-3
    assert layers(module) == 2


def test_dropout_is_that_of_the_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    template, apply = ff.from_module(module, {"*.weight": "mlp embed", "*.bias": "mlp"})
    f = ff.compile(
        apply, template=template, mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), batch=torch.ones(8, 4),
        batch_dims="batch embed", seed=0,
    )  # fmt: skip
    out = f.run_whole(ff.init(template), torch.ones(8, 4))
    assert 0.3 < (out == 0).float().mean() < 0.7
    module.eval()
    g = ff.compile(
        apply, template=template, mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), batch=torch.ones(8, 4),
        batch_dims="batch embed",
    )  # fmt: skip
    torch.testing.assert_close(g.run_whole(ff.init(template), torch.ones(8, 4)), module(torch.ones(8, 4)).detach())


def test_statistics_that_are_written_are_refused() -> None:
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4))
    template, apply = ff.from_module(module, {"0.weight": "_ _ _", "*": "_"})
    settings: Any = {
        "template": template, "mesh": ff.Mesh(dp=2), "layout": layouts.ddp("dp"), "batch": torch.ones(4, 3, 5),
        "batch_dims": "batch _ _",
    }  # fmt: skip
    with pytest.raises(ff.FeatherError, match="1: BatchNorm1d in the mode of training"):
        ff.compile(apply, **settings)
    module.eval()
    ff.compile(apply, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("*.o.weight"), ["'layers.0.attention.o.weight'", "no pattern matches it", "_ _"]),
        (lambda d: d.update({"embed.weight": "vocab"}), ["1 names for 2 dims"]),
        (lambda d: d.update({"embd.weight": "vocab embed"}), ["it matches none", "embed.weight"]),
        (lambda d: d.update({"layers.0.up.bias": "mlp"}), ["match all that it does", "put it before them"]),
    ],
)
def test_patterns_that_do_not_fit(change: Any, words: list[str]) -> None:
    module, dims, *_ = built("transformer")
    dims = dict(dims)
    change(dims)
    with pytest.raises(ff.FeatherError) as e:
        ff.from_module(module, dims)
    assert all(w in str(e.value) for w in (*words, "got:", "problem:", "rule:", "fix:")), str(e.value)


def test_parameters_without_values_or_gradients_and_blocks_that_are_not_there() -> None:
    module, dims, *_ = built("transformer")
    module.layers[0].up.weight.requires_grad_(False)
    with pytest.raises(ff.FeatherError, match=r"ff\.freeze"):
        ff.from_module(module, dims)
    with torch.device("meta"):
        empty = Transformer()
    with pytest.raises(ff.FeatherError, match="it has no values"):
        ff.from_module(empty, dims)
    assert ff.from_module(empty, dims, init=ff.normal(0.1)).template["embed.weight"].init == ff.normal(0.1)
    with pytest.raises(ff.FeatherError, match="matches no submodule"):
        ff.from_module(Transformer(), dims, blocks="layer.*")


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_a_model_of_transformers_is_itself(layout: str) -> None:
    """As it is published: Llama, whose norms and turns are computed in float32."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config).double()
    dims = {
        "*embed_tokens.weight": "vocab embed", "lm_head.weight": "vocab embed", "*q_proj.weight": "heads embed",
        "*[kv]_proj.weight": "kv_heads embed", "*o_proj.weight": "embed heads", "*gate_proj.weight": "mlp embed",
        "*up_proj.weight": "mlp embed", "*down_proj.weight": "embed mlp", "*norm.weight": "embed",
    }  # fmt: skip
    template, apply = ff.from_module(module, dims, blocks="model.layers.*")
    ids = torch.randint(0, 32, (4, 8))
    batch = {"x": ids, "y": ids.roll(-1, 1)}
    mesh, table = LAYOUTS[layout]
    step = ff.compile_step(
        loss_of(lambda params, x: apply(params, input_ids=x, use_cache=False).logits), ff.sgd(lr=1.0),
        template=template, mesh=mesh, layout=table, batch=batch, batch_dims="batch seq",
    )  # fmt: skip
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    new, metrics = step.run_whole(ff.State(params, step.init(seed=0).opt, 0, True), batch)
    total, count = loss_of(lambda _, x: module(input_ids=x, use_cache=False).logits)({}, batch)
    (total / count).backward()
    assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-8)
    for name, p in module.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.detach() - new.params[name], p.grad, rtol=1e-6, atol=1e-7)
