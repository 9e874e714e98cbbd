"""The main job: trains a decoder-only transformer on text as bytes, split over ranks as a layout table says.

    torchrun --standalone --nproc-per-node 4 examples/train.py                            # or: make train
    torchrun --standalone --nproc-per-node 4 examples/train.py --layout "hsdp=2x2" --precision bf16
    python examples/train.py --data my_texts/ --steps 200                                 # one process

The model, the loss and the loop know nothing of ranks. Only `--layout` does: it names the mesh axes with their sizes
and the table of `layouts` that uses each. Every choice trains the same model, step by step, up to rounding.
"""

import argparse
import inspect
import itertools as it
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.data import Batches, eval_batches, ngram_bits, source_text, split
from fx_feather.metrics import MetricsLog, ProgressLine, Stopwatch, bits_per_byte
from fx_feather.models import llama

# torchrun tells each process who it is. Nothing else below depends on the rank but who prints.
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 450
PROMPTS = ("def __init__(self", "import os\n", "    for i in range(", "class ")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level transformer under any layout.")
    default = {1: "single", 4: "fsdp=2,tp_sp=2"}.get(WORLD, f"fsdp={WORLD}")
    parser.add_argument("--layout", default=default, help='such as "ddp=2,tp=2" or "hsdp=2x2"; outermost axis first')
    parser.add_argument("--data", help="text file or folder (default: the source of Python's standard library)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step, over all ranks")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches that a batch is processed in")
    parser.add_argument("--lr", type=float, default=8e-3, help="peak learning rate, after the warm-up")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of compute; bf16 is for GPUs")
    parser.add_argument("--embed", type=int, default=128, help="size of the residual stream")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/train", help="folder of this run's metrics")
    parser.add_argument("--sample", type=int, default=100, help="bytes to write after each prompt at the end")
    return parser.parse_args()


def parse_layout(text: str) -> tuple[ff.Mesh, ff.Layout]:
    """The mesh and the layout of a text such as "fsdp=2,tp_sp=2": each part names a function of `layouts`, and the
    size of each mesh axis that it splits over. The outermost axis comes first, and axes keep their usual names.

    >>> parse_layout("ddp=2,tp=4")[0]
    Mesh(dp=2, tp=4)
    """
    named = {name: f for name, f in vars(layouts).items() if inspect.isfunction(f) and name != "mixed"}
    sizes: dict[str, int] = {}
    layout = ff.Layout()
    for part in text.split(","):
        name, _, numbers = part.strip().partition("=")
        given = numbers.split("x") if numbers else []
        axes = [str(p.default) for p in inspect.signature(named.get(name, layouts.single)).parameters.values()]
        if name not in named:
            problem = f"no layout is named {name!r}"
        elif len(given) != len(axes) or not all(n.isdecimal() for n in given):
            problem = f"{name} splits over {len(axes)} axes {axes}, but {numbers!r} is not {len(axes)} sizes"
        elif any(a in sizes for a in axes):
            problem = f"an axis of {axes} has a size already"
        else:
            sizes |= {axis: int(n) for axis, n in zip(axes, given, strict=True)}
            layout |= named[name](*axes)
            continue
        raise ff.FeatherError(
            f"--layout {text!r}\n"
            f"  got:     {part!r}\n"
            f"  problem: {problem}\n"
            f"  rule:    a layout is its name and the size of each of its axes; several are joined by commas\n"
            f"  fix:     such as 'single', 'fsdp=4', 'ddp=2,tp=2' or 'hsdp=2x2'; names: {', '.join(sorted(named))}"
        )
    return ff.Mesh(**sizes), layout


def summary(collectives: list[Any]) -> str:
    """How often each collective runs over each axis, and the bytes that a rank sends in it."""
    rows: dict[str, list[int]] = {}
    for c in collectives:
        rows.setdefault(f"{c.name}@{','.join(c.axes)}", []).append(c.sent_bytes)
    return ", ".join(f"{len(sent)} {name} of {sum(sent) / 1e6:.2f} MB" for name, sent in rows.items()) or "alone"


def evaluate(loss_fn: ff.Compiled, params: Any, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """Bits per byte: the sum of the loss over all bytes, by their number. Every rank gets the same."""
    total = count = 0.0
    for batch in batches:
        nats, bytes_ = loss_fn(params, loss_fn.shard(batch))
        total, count = total + nats.item(), count + bytes_.item()
    return bits_per_byte(total / count)


def sample(cfg: llama.LlamaConfig, params: Any, setup: dict[str, Any], seq: int, length: int, seed: int) -> list[str]:
    """Continues one prompt a rank, a byte at a time, with the parameters where they are: split over the ranks."""

    def next_logits(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = llama.next_logits(cfg, params, batch["tokens"], batch["positions"], batch["last"])
        return ff.constrain(logits, "_ _")  # whole on every rank, so that all of them choose the same byte

    texts = [bytearray(prompt.encode()) for prompt in it.islice(it.cycle(PROMPTS), max(WORLD, 2))]
    positions = torch.arange(seq).repeat(len(texts), 1)
    random = torch.Generator().manual_seed(seed)
    f = None
    for _ in range(length):
        windows = [text[-seq:] for text in texts]
        tokens = torch.tensor([list(w) + [0] * (seq - len(w)) for w in windows])
        last = torch.tensor([len(w) - 1 for w in windows])
        batch = {"tokens": tokens, "positions": positions, "last": last}
        f = f or ff.compile(next_logits, batch=batch, **setup)
        chances = torch.softmax(f(params, f.shard(batch)).double().cpu() / 0.7, -1)
        for text, byte in zip(texts, torch.multinomial(chances, 1, generator=random).flatten().tolist(), strict=True):
            text.append(byte)
    return [text.decode(errors="replace") for text in texts[: len(PROMPTS)]]


def main(args: argparse.Namespace) -> bool:
    """Trains, evaluates and samples; whether the model is better than the order-2 byte model."""
    started = time.perf_counter()
    mesh, layout = parse_layout(args.layout)
    if args.precision == "bf16":
        layout |= layouts.mixed()
    train_text, held_out = split(source_text(args.data))
    batches = Batches(train_text, args.batch, args.seq, args.seed)

    shape = {"layers": args.layers, "embed": args.embed, "heads": 4, "kv_heads": 2, "mlp": 3 * args.embed}
    cfg = llama.LlamaConfig(vocab=256, qk_norm=True, init_std=0.04, **shape)
    schedule = ff.warmup_cosine(args.lr, max(1, args.steps // 20), args.steps, args.lr / 20)
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(schedule, weight_decay=0.1))
    setup: dict[str, Any] = {"template": llama.template(cfg), "mesh": mesh, "layout": layout}
    step = ff.compile_step(llama.loss(cfg), optimizer, batch=batches[0], accumulate=args.accumulate, **setup)
    held = list(eval_batches(held_out, args.batch // args.accumulate, args.seq))
    held_loss = ff.compile(llama.loss(cfg), batch=held[0], **setup)
    state = step.init(args.seed)

    line = ProgressLine(args.steps, every=10, rank=RANK)
    log = MetricsLog(Path(args.out) / "metrics.jsonl", RANK)
    watch = Stopwatch()
    parameters = sum(math.prod(p.shape) for p in optree.tree_leaves(setup["template"]))
    line.note(f"{layout}\non {mesh!r}: {parameters:,} parameters, {len(train_text):,} bytes of text")
    line.note(f"compiled in {time.perf_counter() - started:.1f} s; a step on each rank: {summary(step.collectives())}")
    log.write(layout=args.layout, parameters=parameters, **{k: v for k, v in vars(args).items() if k != "layout"})

    few = held[:: max(1, len(held) // 8)]
    for i in range(args.steps):
        state, metrics = step(state, step.shard(batches[i]))
        rate, lr = watch.lap(args.batch * args.seq), float(schedule(i))
        shown = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "lr": lr, "tokens_per_second": rate}
        line.show(i + 1, **shown)
        log.write(step=i + 1, bits_per_byte=bits_per_byte(metrics["loss"]), **shown)
        if (i + 1) % 100 == 0 and i + 1 < args.steps:
            with watch.paused():
                bits = evaluate(held_loss, state.params, few)
            line.note(f"held-out {bits:.3f} bits/byte (on {len(few)} of {len(held)} batches)")
            log.write(step=i + 1, held_out_bits_per_byte=bits, batches=len(few))
    line.close()

    bits = evaluate(held_loss, state.params, held)
    order2 = ngram_bits(train_text, held_out, order=2)
    log.write(step=args.steps, held_out_bits_per_byte=bits, order2_bits_per_byte=order2, batches=len(held))
    line.note(f"held-out text, all {len(held_out):,} bytes: model {bits:.4f}, order-2 model {order2:.4f} bits/byte")
    for text in sample(cfg, state.params, setup, args.seq, args.sample, args.seed) if args.sample else []:
        line.note("--- " + text.replace("\n", "\n    "))
    line.note(f"{watch.tokens_per_second:,.0f} tokens/s in training, {time.perf_counter() - started:.0f} s in all")
    better = bits < order2
    line.note(
        f"checked: held-out {bits:.2f} {'<' if better else '>='} order-2 {order2:.2f} bits per byte: "
        + ("OK" if better else "NOT REACHED")
    )
    return better


if __name__ == "__main__":
    args = arguments()
    try:
        better = main(args)
    except ff.FeatherError as error:
        # Every rank is told the same. torchrun stops all when one ends, so the others let the first speak.
        time.sleep(3 if RANK else 0)
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)
    sys.exit(0 if better or args.steps < STEPS else 1)
