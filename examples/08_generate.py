"""Writing text: prompts are read in one step, each further token costs one more, and a layout splits the cache.

    python examples/08_generate.py                                           # two ranks, simulated
    torchrun --standalone --nproc-per-node 2 examples/08_generate.py         # two processes

What is kept of a token decides how many texts fit beside a model. Every head may have a key and a value of its own
(MHA), query heads may share them (GQA), or all of them may be read off one latent vector (MLA). The cache is a pytree
with dim names, so the same layout that splits the heads of the weights splits the heads of the cache.
"""

import functools as ft
import os
from types import ModuleType
from typing import Any

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.models import deepseek_v2, llama, presets
from fx_feather.nn import cache

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MESH = ff.Mesh(tp=WORLD if WORLD > 1 else 2)
HEADS, NEW, LENGTH = 2 * MESH["tp"], 6, 16
PROMPTS = [[11, 7, 3, 5], [2], [1, 4, 1, 5, 9, 2, 6]]

SMALL: dict[str, Any] = {"vocab": 31, "layers": 2, "embed": 16, "heads": HEADS, "mlp": 8 * HEADS}
SMALL |= {"init_std": 0.4, "dtype": torch.float64}
LATENT = {"q_rank": None, "kv_rank": 8, "plain_dim": 4, "rope_dim": 2, "value_dim": 4, "dense_layers": 1}
EXPERTS = {"experts": 4, "expert_mlp": 8, "shared_experts": 1, "top_k": 2}
# For each kind a small model, and a public one to tell what its cache takes.
KINDS: dict[str, tuple[ModuleType, Any, str]] = {
    "MHA": (llama, llama.LlamaConfig(**SMALL, kv_heads=HEADS, head_dim=4), "Llama-2-7B"),
    "GQA": (llama, llama.LlamaConfig(**SMALL, kv_heads=MESH["tp"], head_dim=4), "Llama-3-8B"),
    "MLA": (deepseek_v2, deepseek_v2.DeepSeekV2Config(**SMALL, **LATENT, **EXPERTS), "DeepSeek-V2"),
}


def recomputed(family: ModuleType, cfg: Any, sampling: ff.Sampling) -> list[list[int]]:
    """Each text by itself on one device, computed from its first token for every new one."""
    params, texts = ff.init(family.template(cfg), seed=0), []
    for i, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for step in range(NEW):
            logits = family.forward(cfg, params, torch.tensor([text]), torch.arange(len(text))[None])[:, -1]
            # Draws are made for each text by its place among the others.
            text.append(int(sampling.choose(logits.expand(i + 1, -1), step)[i]))
        texts.append(text[len(prompt) :])
    return texts


def main() -> None:
    lines, same, sizes = [], True, []
    for kind, (family, cfg, public) in KINDS.items():
        kept = family.cache_template(cfg, batch=len(PROMPTS), length=LENGTH)
        generate = ff.Generator(
            ft.partial(family.extend, cfg),
            template=family.template(cfg),
            cache=kept,
            mesh=MESH,
            layout=layouts.tp("tp"),
        )
        for sampling in (ff.Sampling(), ff.Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=1)):
            texts = generate.run_whole(ff.init(generate.template, seed=0), PROMPTS, NEW, sampling)
            same = same and texts == recomputed(family, cfg, sampling)
            lines.append(f"{kind}, temperature {sampling.temperature}: {texts}")
        parts = {str(t) for t in optree.tree_leaves(generate.decode.out_types[1])}
        lines.append(f"  a layer keeps {', '.join(sorted(parts))}")
        config = presets.PRESETS[public]
        sizes.append(f"{kind} {cache.bytes_per_token(family.cache_template(config, 1, 1))} ({public})")
    if RANK == 0:
        print("\n".join(lines))
        if not same:
            raise SystemExit("wrong: a text that was written with a cache is not the one that is computed without")
        print(f"checked: cached == recomputed on {MESH!r}; bytes of cache a token: {', '.join(sizes)}")


if __name__ == "__main__":
    main()
