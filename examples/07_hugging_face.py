"""A folder in Hugging Face's format: read it, look at how a layout splits it, train it further, let it write, save it.

    python examples/07_hugging_face.py                                      # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/07_hugging_face.py    # four processes, each reads its own part
    python examples/07_hugging_face.py path/to/folder                       # a Llama of one's own, in bytes

Without a folder a tiny Llama is made and saved first. `config.json` names the architecture, and each parameter is read
from where it lies in the files into the part of it that a rank holds. What is saved at the end, `transformers` loads.
"""

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.models import accounting, llama

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
RANKS = WORLD if WORLD > 1 else 4
MESH = ff.Mesh(dp=2 if RANKS % 2 == 0 else 1, tp=RANKS // 2 if RANKS % 2 == 0 else RANKS)
LAYOUT = layouts.fsdp("dp") | layouts.tp_sp("tp")
SEQ, ROWS, STEPS = 32, 8, 20


def show(*text: object) -> None:
    if RANK == 0:
        print(*text)


def make(folder: Path) -> None:
    """A tiny Llama whose tokens are bytes; each rank makes a folder of its own."""
    heads = 2 * MESH["tp"]
    config = llama.LlamaConfig(vocab=256, layers=2, embed=32, heads=heads, kv_heads=MESH["tp"], head_dim=8, mlp=96)
    model = ff.hf.Model(config)
    ff.hf.save(folder, model, ff.init(model.template))


def table(model: ff.hf.Model) -> None:
    """One line a parameter of the first layer: what each rank holds at rest, and what it computes with."""
    paths, leaves, _ = optree.tree_flatten_with_path(model.template["layers"][0])
    for path, p in zip(paths, leaves, strict=True):
        t = LAYOUT.param_types(p.dim_names, p.shape, p.dtype)
        show(f"  {'.'.join(map(str, path)):18}{p.dims:24}{t.store!r:30} in use {t.compute!r}")


def batch() -> dict[str, torch.Tensor]:
    """Windows of this file's own text; each byte predicts the next."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: ROWS * SEQ + 1]
    positions = torch.arange(SEQ).expand(ROWS, SEQ).contiguous()
    return {"tokens": rows[:-1].view(ROWS, SEQ), "targets": rows[1:].view(ROWS, SEQ), "positions": positions}


def main(folder: Path, out: Path) -> None:
    # On several ranks each reads its local parts; in one process the whole values, which `simulate` splits.
    model, params = ff.hf.load(folder, *((MESH, LAYOUT) if WORLD > 1 else ()))
    size = accounting.size(model.template)
    show(
        f"{model.model_type}: {size.total} parameters, {accounting.cache_bytes(model.template)} bytes of cache a token"
    )
    show(f"layer 0 on {MESH}:")
    table(model)

    data = batch()
    step = ff.compile_step(
        model.loss, ff.adamw(lr=1e-2), template=model.template, mesh=MESH, layout=LAYOUT, batch=data
    )  # fmt: skip
    state, losses = dataclasses.replace(step.init(), params=params), []
    for _ in range(STEPS):
        state, metrics = step(state, step.shard(data)) if WORLD > 1 else step.simulate(state, data)
        losses.append(metrics["loss"])
    show(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")

    trained = step.whole(state).params
    prompt = data["tokens"][:1, :8]
    written = llama.generate(model.config, trained, prompt, 24, temperature=0)
    show(f"it writes {bytes(written[0].tolist())!r}")

    ff.hf.save(out, model, trained)
    again, loaded = ff.hf.load(out)
    same = all(map(torch.equal, optree.tree_leaves(loaded), optree.tree_leaves(trained)))
    if not (same and again.config == model.config and losses[-1] < losses[0] - 0.5):
        raise SystemExit("wrong: the files do not hold what was trained, or the loss did not fall")
    show(f"checked: {len(list(out.iterdir()))} files hold the trained bits, and the loss fell")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(own, "made")
        if len(sys.argv) == 1:
            make(source)
        main(source, Path(own, "saved"))
