"""Comparison with the reference implementations: a tiny random model of theirs is loaded here, and both are run."""

import copy
import json
import re

import torch
from safetensors.torch import load_file
from transformers.utils import logging

import fx_feather as ff
from fx_feather import hf, tree
from fx_feather.optim import apply_updates

logging.set_verbosity_error()
logging.disable_progress_bar()


def random_model(kind, config, seed=0):
    """A model with every parameter and router bias random, norms too, and its experts computed in a plain loop."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if p.ndim == 1 and ("norm" in name or "ln_" in name) and name.endswith("weight"):
                p.copy_(1 + 0.2 * torch.randn(p.shape))
            elif p.ndim > 1 or "bias" in name:
                p.copy_((0.3 if p.ndim > 1 else 0.1) * torch.randn(p.shape))
    return model


def save(model, folder):
    """Saves a model as it is published, and gives the names and tensors of its file."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def published(model, tensors):
    """Tensors named as in memory (such as gradients) under the names and in the pieces that files have."""
    out = {}
    mixtral = model.config.model_type == "mixtral"
    for name, x in tensors.items():
        experts = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        if mixtral:
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        if experts is None:
            out[name] = x
            continue
        block = "block_sparse_moe" if mixtral else "mlp"
        names = (
            {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {k: f"{k}_proj" for k in ("gate", "up", "down")}
        )
        for e, w in enumerate(x):
            at = f"{experts[1]}.{block}.experts.{e}"
            if experts[2] == "down_proj":
                out[f"{at}.{names['down']}.weight"] = w
            else:
                out[f"{at}.{names['gate']}.weight"], out[f"{at}.{names['up']}.weight"] = w.chunk(2)
    return out


def batch_of(vocab, batch=2, seq=12, seed=1):
    """Random tokens; each predicts the one after it."""
    tokens = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
    targets = torch.cat([tokens[:, 1:], torch.full((batch, 1), -100)], 1)
    return {"tokens": tokens, "targets": targets, "positions": torch.arange(seq).expand(batch, seq)}


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def in_files(model, values):
    """A pytree like the template as the tensors of files."""
    out = {}
    for part, x in zip(tree.leaves(model.parts()), tree.leaves(values), strict=True):
        for name in part.names:
            part.write(x, name, out.setdefault(name, torch.zeros(part.file_shape, dtype=x.dtype)))
    return out


def _decays(params):
    return tree.map_with_path(lambda path, _: "['router']['bias']" not in path, params)


def check(kind, config, folder, vocab):
    """Logits, greedy text, loss, all gradients, three AdamW steps, and back again; gives the model that was loaded."""
    theirs = random_model(kind, config)
    file = save(theirs, folder / "theirs")
    model, params = hf.load(folder / "theirs")
    batch = batch_of(vocab)

    def their_loss():
        return theirs(input_ids=batch["tokens"], labels=batch["tokens"]).loss

    with torch.no_grad():
        logits = theirs(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(model.apply(params, batch["tokens"]), logits, rtol=0, atol=2e-4)

    text = batch["tokens"][:, :4]
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(text, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    for _ in range(8):
        text = torch.cat([text, model.apply(params, text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(text, expected)

    out, grads = ff.value_and_grad(model.loss)(params, batch)
    loss = their_loss()
    assert abs(out["loss"].item() - loss.item()) < 2e-5
    loss.backward()
    named = {name: p.grad for name, p in theirs.named_parameters()}
    their_grads = published(theirs, named)
    our_grads = in_files(model, grads)
    assert our_grads.keys() - _biases(file) == their_grads.keys() & our_grads.keys()
    for name, grad in our_grads.items():
        if name in _biases(file):
            assert not grad.any(), name
        else:
            assert relative(grad, their_grads[name]) < 5e-4, (name, relative(grad, their_grads[name]))

    optimizer = ff.adamw(lr=3e-3, b1=0.9, b2=0.95, weight_decay=0.1, decay_mask=_decays)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    now, state = params, optimizer.init(params)
    for _ in range(3):
        out, grads = ff.value_and_grad(model.loss)(now, batch)
        updates, state = optimizer.update(grads, state, now)
        now = apply_updates(now, updates)
        their_optimizer.zero_grad()
        loss = their_loss()
        loss.backward()
        their_optimizer.step()
        assert abs(out["loss"].item() - loss.item()) < 1e-4

    hf.save(folder / "ours", model, params)
    ours = load_file(folder / "ours" / "model.safetensors")
    assert ours.keys() == file.keys()
    for name in ours:
        assert torch.equal(ours[name], file[name]), name
    again = kind.from_pretrained(folder / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=batch["tokens"]).logits, logits, rtol=0, atol=2e-5)
    _older_words_mean_the_same(folder / "ours", model)
    return model, params


def _biases(file):
    return {name for name in file if name.endswith("e_score_correction_bias")}


def _older_words_mean_the_same(folder, model):
    """Reads the config once in newer and once in older keys alone."""
    whole = json.loads((folder / "config.json").read_text())
    for gone in (("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")):
        left = {k: v for k, v in copy.deepcopy(whole).items() if k not in gone}
        (folder / "config.json").write_text(json.dumps(left))
        assert hf.load(folder)[0].config == model.config
    (folder / "config.json").write_text(json.dumps(whole))


def packed_equals_alone(model, params, vocab):
    """Two documents in one sequence have the logits that each has by itself."""
    one, two = batch_of(vocab, 1, 5, 2)["tokens"], batch_of(vocab, 1, 7, 3)["tokens"]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    documents = torch.tensor([[4] * 5 + [1] * 7])
    both = model.apply(params, torch.cat([one, two], 1), positions, documents)
    alone = torch.cat([model.apply(params, one), model.apply(params, two)], 1)
    torch.testing.assert_close(both, alone, rtol=0, atol=2e-5)
