"""The Llama model against a plain reference, and the properties any decoder has."""

import functools as ft
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from fx_feather.errors import ShapeError
from fx_feather.models import llama
from fx_feather.models.llama import LlamaConfig
from fx_feather.param import init
from fx_feather.trace import trace

CONFIGS = {
    "grouped": LlamaConfig(
        vocab=13, layers=2, embed=12, heads=4, kv_heads=2, head_dim=4, mlp=10, dtype=torch.float64, init_std=0.4
    ),
    "tied, q/k-norm": LlamaConfig(
        vocab=11, layers=3, embed=8, heads=4, kv_heads=1, mlp=6, qk_norm=True, tied=True, dtype=torch.float64,
        init_std=0.4, rope_theta=500.0, norm_eps=1e-3,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def cfg(request):
    return CONFIGS[request.param]


def random_params(cfg, seed=0):
    """The template's initial values, with the norms' scales moved off one."""
    g = torch.Generator().manual_seed(seed + 1)
    whole = init(llama.template(cfg), seed=seed)
    return pytree.tree_map(lambda p: p + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype), whole)


def random_batch(cfg, batch=2, seq=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, cfg.vocab, (2, batch, seq), generator=g)
    targets[0, :2] = -100
    return {"tokens": tokens, "targets": targets, "positions": torch.arange(seq).expand(batch, seq)}


def reference(cfg, params, tokens, positions):
    """The same model from the papers' equations: complex turns, repeated kv heads, an explicit mask."""

    def rms(x, w):
        return x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * w

    def turn(x):
        half = x.shape[-1] // 2
        w = torch.tensor([cfg.rope_theta ** (-j / half) for j in range(half)], dtype=torch.float64)
        angles = (positions[..., None] * w)[:, :, None]
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], -1)

    seq, size = tokens.shape[1], cfg.head_size
    mask = torch.full((seq, seq), -math.inf, dtype=torch.float64).triu(1)
    x = params["embed"][tokens]
    for p in params["layers"]:
        a, h = p["attention"], rms(x, p["attention_norm"])
        q, k, v = (torch.tensordot(h, a[n], dims=1) for n in "qkv")
        if cfg.qk_norm:
            q, k = rms(q, a["q_norm"]), rms(k, a["k_norm"])
        q, k = turn(q), turn(k)
        k, v = (t.repeat_interleave(cfg.heads // cfg.kv_heads, dim=2) for t in (k, v))
        scores = torch.stack([q[:, :, i] @ k[:, :, i].mT for i in range(cfg.heads)]) / size**0.5 + mask
        values = torch.stack([scores[i].softmax(-1) @ v[:, :, i] for i in range(cfg.heads)], 2)
        x = x + torch.tensordot(values, a["o"], dims=2)
        m, h = p["mlp"], rms(x, p["mlp_norm"])
        gate = h @ m["gate"]
        x = x + (gate * torch.sigmoid(gate) * (h @ m["up"])) @ m["down"]
    head = params["embed"] if cfg.tied else params["head"]
    return rms(x, params["norm"]) @ head.T


def reference_loss(cfg, params, batch):
    logits = reference(cfg, params, batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def test_logits_equal_the_reference(cfg):
    params, batch = random_params(cfg), random_batch(cfg)
    batch["positions"] = batch["positions"] * 3 + 7
    ours = llama.forward(cfg, params, batch["tokens"], batch["positions"])
    expected = reference(cfg, params, batch["tokens"], batch["positions"])
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_every_leafs_gradient_equals_the_references_and_autograds(cfg):
    params, batch = random_params(cfg), random_batch(cfg)
    loss_fn = llama.loss(cfg)
    ours, spec = pytree.tree_flatten(torch.func.grad(lambda p: loss_fn(p, batch)[0])(params))
    expected = pytree.tree_leaves(torch.func.grad(lambda p: reference_loss(cfg, p, batch))(params))
    leaves = [p.requires_grad_() for p in pytree.tree_leaves(params)]
    autograd = torch.autograd.grad(loss_fn(pytree.tree_unflatten(leaves, spec), batch)[0], leaves)
    assert len(ours) == len(expected) == len(autograd)
    for one, two, three in zip(ours, expected, autograd, strict=True):
        scale = two.norm()
        assert scale > 0
        assert (one - two).norm() <= 1e-10 * scale
        assert (one - three).norm() <= 1e-12 * scale


def test_gradcheck():
    cfg = LlamaConfig(
        vocab=5, layers=1, embed=4, heads=2, kv_heads=1, mlp=3, qk_norm=True, dtype=torch.float64, init_std=0.5
    )
    batch = random_batch(cfg, batch=1, seq=3)
    leaves, spec = pytree.tree_flatten(random_params(cfg))
    loss_fn = llama.loss(cfg)
    assert torch.autograd.gradcheck(
        lambda *args: loss_fn(pytree.tree_unflatten(list(args), spec), batch)[0],
        [p.requires_grad_() for p in leaves],
    )


def test_loss_counts_valid_targets(cfg):
    batch = random_batch(cfg)
    total, count = llama.loss(cfg)(random_params(cfg), batch)
    assert count.item() == 10
    torch.testing.assert_close(total, reference_loss(cfg, random_params(cfg), batch), rtol=1e-10, atol=0)


def test_no_place_reads_a_later_one(cfg):
    params, batch = random_params(cfg), random_batch(cfg)
    before = llama.forward(cfg, params, batch["tokens"], batch["positions"])
    for place in range(6):
        tokens = batch["tokens"].clone()
        tokens[:, place] = (tokens[:, place] + 1) % cfg.vocab
        after = llama.forward(cfg, params, tokens, batch["positions"])
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.isclose(before[:, place:], after[:, place:]).all(-1).any()


def test_only_differences_of_positions_matter(cfg):
    params, batch = random_params(cfg), random_batch(cfg)
    one = llama.forward(cfg, params, batch["tokens"], batch["positions"])
    two = llama.forward(cfg, params, batch["tokens"], batch["positions"] + 1000)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(one, llama.forward(cfg, params, batch["tokens"], batch["positions"] * 2))


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_a_uniform_guess(tied):
    cfg = LlamaConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128, tied=tied)
    batch = random_batch(cfg, batch=4, seq=64)
    total, count = llama.loss(cfg)(init(llama.template(cfg)), batch)
    assert abs(total / count - math.log(256)) < 0.1


def test_bf16_parameters_give_bf16_logits_near_the_wide_ones():
    sizes = {"vocab": 32, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "qk_norm": True}
    cfg = LlamaConfig(**sizes, dtype=torch.bfloat16)
    params, batch = init(llama.template(cfg)), random_batch(cfg)
    out = llama.forward(cfg, params, batch["tokens"], batch["positions"])
    wide = LlamaConfig(**sizes, dtype=torch.float64)
    exact = llama.forward(wide, pytree.tree_map(torch.Tensor.double, params), batch["tokens"], batch["positions"])
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() < 0.02 * exact.norm()
    assert llama.loss(cfg)(params, batch)[0].dtype == torch.float32


def test_template_dims_and_shapes():
    cfg = LlamaConfig(vocab=13, layers=2, embed=12, heads=4, kv_heads=2, head_dim=6, mlp=10, qk_norm=True)
    template = llama.template(cfg)
    top = {name: (p.dims, tuple(p.shape)) for name, p in template.items() if name != "layers"}
    assert top == {
        "embed": ("vocab embed", (13, 12)),
        "norm": ("embed", (12,)),
        "head": ("vocab embed", (13, 12)),
    }
    assert len(template["layers"]) == 2
    layer = template["layers"][1]
    assert set(layer) == {"attention_norm", "attention", "mlp_norm", "mlp"}
    assert (layer["attention"]["q"].dims, tuple(layer["attention"]["q"].shape)) == ("embed heads head_dim", (12, 4, 6))
    assert tuple(layer["attention"]["k_norm"].shape) == (6,)
    assert "head" not in llama.template(CONFIGS["tied, q/k-norm"])


def test_projections_to_the_residual_stream_start_smaller_with_depth():
    cfg = LlamaConfig(vocab=8, layers=8, embed=128, heads=4, kv_heads=4, mlp=256)
    layer = init(llama.template(cfg))["layers"][0]
    for weight in (layer["attention"]["o"], layer["mlp"]["down"]):
        assert math.isclose(weight.std().item(), 0.02 / 4, rel_tol=0.05)
    for weight in (layer["attention"]["q"], layer["mlp"]["up"]):
        assert math.isclose(weight.std().item(), 0.02, rel_tol=0.05)


def greedy(cfg, params, prompt, length):
    """One token after another, with no window and no padding."""
    for _ in range(length):
        positions = torch.arange(prompt.shape[1]).expand(prompt.shape)
        token = llama.forward(cfg, params, prompt, positions)[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, token], 1)
    return prompt


def test_generate_at_temperature_zero_takes_the_likeliest_token(cfg):
    params, prompt = random_params(cfg), torch.tensor([[1, 2, 3], [4, 5, 0]])
    out = llama.generate(cfg, params, prompt, 5, temperature=0)
    assert torch.equal(out, greedy(cfg, params, prompt, 5))
    assert torch.equal(llama.generate(cfg, params, prompt, 0), prompt)


def test_generate_reads_no_further_back_than_its_window(cfg):
    params, prompt = random_params(cfg), torch.tensor([[1, 2, 3, 4]])
    expected = prompt
    for _ in range(5):
        expected = torch.cat([expected, greedy(cfg, params, expected[:, -3:], 1)[:, -1:]], 1)
    assert torch.equal(llama.generate(cfg, params, prompt, 5, temperature=0, window=3), expected)


def test_generate_follows_its_seed_and_the_models_chances(cfg):
    params, prompt = random_params(cfg), torch.tensor([[1, 2]])
    one, two, three = (llama.generate(cfg, params, prompt, 12, seed=s) for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    drawn = llama.generate(cfg, params, prompt.expand(4000, 2), 1, temperature=2.0)[:, -1]
    logits = llama.forward(cfg, params, prompt, torch.tensor([[0, 1]]))[0, -1]
    seen = torch.bincount(drawn, minlength=cfg.vocab) / 4000
    torch.testing.assert_close(seen.double(), (logits / 2).softmax(-1), rtol=0, atol=0.04)


def test_layers_are_traced_once_in_few_operators():
    cfg = LlamaConfig(vocab=16, layers=5, embed=8, heads=4, kv_heads=2, mlp=12, qk_norm=True)
    program = trace(llama.loss(cfg), (init(llama.template(cfg)), random_batch(cfg)))
    (layer,) = [unit for unit in program.units if unit.name == "layer"]
    assert [program.units[call.unit].name for call in program.calls].count("layer") == 5
    operators = [str(n.target) for n in layer.graph.nodes if n.op == "call_function"]
    arithmetic = [name for name in operators if name.startswith("aten.") and name != "aten.alias.default"]
    assert len(arithmetic) == 24, arithmetic
    assert operators.count("fx_feather.constrain.default") == 10
    assert program.dim_names() <= {
        "batch",
        "seq",
        "residual_seq",
        "kv_seq",
        "embed",
        "heads",
        "kv_heads",
        "head_dim",
        "mlp",
        "vocab",
    }


def test_the_next_tokens_logits_can_be_traced():
    cfg = CONFIGS["grouped"]
    tokens = torch.zeros(2, 4, dtype=torch.long)
    program = trace(ft.partial(llama.next_logits, cfg), (random_params(cfg), tokens, tokens, tokens[:, 0]))
    (out,) = program.units[program.calls[-1].unit].outputs
    assert program.calls[-1].outs == program.outputs and out.meta["val"].shape == (2, cfg.vocab)


GOOD = {"vocab": 16, "layers": 1, "embed": 8, "heads": 4, "kv_heads": 2, "mlp": 16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kv_heads": 3},
            ["LlamaConfig(heads, kv_heads)", "heads=4, kv_heads=3", "4 % 3 = 1", "kv_heads=2, or heads=6"],
        ),
        ({"head_dim": 5}, ["LlamaConfig(head_dim)", "5 features", "in pairs", "head_dim=6"]),
        ({"embed": 10}, ["LlamaConfig(embed, heads, head_dim)", "10 % 4 = 2", "equal parts", "embed=12"]),
        ({"embed": 12}, ["LlamaConfig(embed, heads, head_dim)", "3 features", "head_dim=4"]),
        ({"layers": 0}, ["LlamaConfig(layers)", "layers is 0", "positive integer", "layers=1"]),
        ({"vocab": 2.5}, ["vocab is 2.5", "positive integer"]),
        ({"heads": True}, ["heads is True", "positive integer"]),
        ({"rope_theta": -1.0}, ["rope_theta is -1.0", "positive number", "rope_theta=10000.0"]),
        ({"norm_eps": math.nan}, ["norm_eps is nan", "positive number", "norm_eps=1e-05"]),
        ({"init_std": "big"}, ["init_std is 'big'", "positive number", "init_std=0.02"]),
        ({"dtype": torch.int64}, ["torch.int64 is not a floating dtype", "torch.bfloat16", "dtype=torch.float32"]),
    ],
)
def test_a_bad_config_is_refused_in_five_parts(change, words):
    with pytest.raises(ShapeError) as error:
        LlamaConfig(**{**GOOD, **change})
    text = str(error.value)
    for word in [*words, "got:", "problem:", "rule:", "fix:"]:
        assert word in text


def test_all_faults_of_a_config_are_listed_at_once():
    with pytest.raises(ShapeError, match=r"^4 problems:") as error:
        LlamaConfig(vocab=0, layers=-1, embed=8, heads=4, kv_heads=3, head_dim=7, mlp=16)
    for word in ("vocab is 0", "layers is -1", "4 % 3 = 1", "7 features"):
        assert word in str(error.value)


def test_bad_arguments_of_generate_are_listed_at_once():
    cfg = CONFIGS["grouped"]
    with pytest.raises(ShapeError, match=r"^4 problems:") as error:
        llama.generate(cfg, {}, torch.zeros(1, 0, dtype=torch.long), -1, temperature=math.nan, window=0)
    for word in ("shape [1, 0]", "length=-1", "temperature=nan", "window=0", "n of at least 1"):
        assert word in str(error.value)
