"""No layout sends more than it has to: the bytes of each are those of its lower bound, collective by collective.

A ring moves `(n - 1) / n` of a value of `n` ranks in an all-gather or a reduce-scatter, and no algorithm moves less
(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009, section 3); an all-reduce is both. What a layout has
to move follows from where values are needed: gradients on all ranks that hold a copy of the parameter, parameters
wherever they are used, activations where the next matmul reads them.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.models import llama

BATCH, SEQ = 8, 8
CFG = llama.LlamaConfig(vocab=16, layers=3, embed=8, heads=4, kv_heads=4, mlp=16)
TEMPLATE = llama.template(CFG)


def size(part: object) -> int:
    """Bytes of some parameters."""
    return 4 * sum(p.numel for p in tree.leaves(part))


ALL, EMBED, HEAD = size(TEMPLATE), size(TEMPLATE["embed"]), size([TEMPLATE["head"], TEMPLATE["norm"]])
NORMS = size([TEMPLATE["norm"], *(p[n] for p in TEMPLATE["layers"] for n in ("attention_norm", "mlp_norm"))])


def moved(n: int) -> float:
    """The part of a value that each of `n` ranks sends in an all-gather or a reduce-scatter."""
    return (n - 1) / n


def stream(ranks: int) -> int:
    """Bytes of the residual stream of the sequences that one of so many data ranks has."""
    return 4 * BATCH // ranks * SEQ * CFG.embed


def sharded(n: int) -> float:
    """Parameters gathered forward and again backward, and gradients scattered.

    The last unit's parameters are still there when the backward begins, and that of an embedding needs no table.
    """
    return moved(n) * (ALL + (ALL - HEAD - EMBED) + ALL)


def tensor(data: int, n: int) -> float:
    """Four gathers or scatters of the stream a block each way, and one each way behind the embedding and the last."""
    one_way = 4 * CFG.layers + 2
    of_loss = 2 * 2 * 4 * BATCH // data * SEQ  # the largest logit, and the sum: all-reduces of a number a token
    return moved(n) * (2 * one_way * stream(data) + of_loss)


def context(n: int) -> float:
    """Keys and values of each block, gathered forward and scattered backward."""
    kept = 4 * BATCH * SEQ * CFG.kv_heads * CFG.head_size
    return moved(n) * 2 * 2 * CFG.layers * kept


BOUNDS: dict[str, tuple[ff.Mesh, ff.Layout, Callable[[], float]]] = {
    "ddp 2": (ff.Mesh(dp=2), layouts.ddp("dp"), lambda: 2 * moved(2) * ALL),
    "ddp 4": (ff.Mesh(dp=4), layouts.ddp("dp"), lambda: 2 * moved(4) * ALL),
    "zero1 4": (ff.Mesh(dp=4), layouts.zero1("dp"), lambda: 2 * moved(4) * ALL),
    "zero2 4": (ff.Mesh(dp=4), layouts.zero2("dp"), lambda: 2 * moved(4) * ALL),
    "fsdp 2": (ff.Mesh(dp=2), layouts.fsdp("dp"), lambda: sharded(2)),
    "fsdp 8": (ff.Mesh(dp=8), layouts.fsdp("dp"), lambda: sharded(8)),
    # Between replicas only what a rank holds of the gradients is reduced.
    "hsdp 2x4": (ff.Mesh(r=2, s=4), layouts.hsdp("r", "s"), lambda: sharded(4) + 2 * moved(2) * ALL / 4),
    # The norms' weights are whole on all ranks, and each has seen a part of the sequence.
    "tp_sp 2": (ff.Mesh(tp=2), layouts.tp_sp("tp"), lambda: tensor(1, 2) + 2 * moved(2) * NORMS),
    "tp_sp 4": (ff.Mesh(tp=4), layouts.tp_sp("tp"), lambda: tensor(1, 4) + 2 * moved(4) * NORMS),
    # Keys and values of every block are gathered, and their cotangents scattered.
    "cp 2": (ff.Mesh(cp=2), layouts.cp("cp"), lambda: 2 * moved(2) * ALL + context(2)),
    "cp 4": (ff.Mesh(cp=4), layouts.cp("cp"), lambda: 2 * moved(4) * ALL + context(4)),
    # All-reduces in the place of a scatter and a gather move the same, and the norms see all of the sequence.
    "tp 4": (ff.Mesh(tp=4), layouts.tp("tp"), lambda: tensor(1, 4)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_step_sends_its_lower_bound(name: str) -> None:
    mesh, layout, bound = BOUNDS[name]
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens}
    step = ff.compile_step(
        llama.loss(CFG),
        ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(1e-3)),
        template=TEMPLATE,
        mesh=mesh,
        layout=layout,
        batch=batch,
    )
    numbers = [c for c in step.collectives() if c.operand_bytes <= 32]
    # Sum and count of the loss, with two numbers that ranks compare; and the norm of gradients that no rank has whole.
    assert len(numbers) <= 2
    assert sum(c.sent_bytes for c in step.collectives() if c not in numbers) == bound()


@pytest.mark.parametrize("accumulate", [2, 4])
def test_microbatches_send_gradients_once_unless_they_are_stored_in_parts(accumulate: int) -> None:
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens}
    sent = {}
    for name, layout in (("ddp", layouts.ddp("dp")), ("zero1", layouts.zero1("dp")), ("fsdp", layouts.fsdp("dp"))):
        step = ff.compile_step(
            llama.loss(CFG),
            ff.adamw(1e-3),
            template=TEMPLATE,
            mesh=ff.Mesh(dp=2),
            layout=layout,
            batch=batch,
            accumulate=accumulate,
        )
        sent[name] = sum(c.sent_bytes for c in step.collectives() if c.operand_bytes > 32)
    assert sent == {"ddp": ALL, "zero1": ALL, "fsdp": accumulate * sharded(2)}


TIED = dataclasses.replace(CFG, tied=True)
TIED_ALL = size(llama.template(TIED))


def tied(n: int) -> float:
    """The table is gathered once, for the embedding, and is still there for the head and its backward."""
    last = size([llama.template(TIED)["embed"], llama.template(TIED)["norm"]])
    return moved(n) * (TIED_ALL + (TIED_ALL - last) + TIED_ALL)


@pytest.mark.parametrize(
    ("mesh", "layout", "bound"),
    [
        (ff.Mesh(dp=4), layouts.ddp("dp"), 2 * moved(4) * TIED_ALL),
        (ff.Mesh(dp=4), layouts.zero1("dp"), 2 * moved(4) * TIED_ALL),
        (ff.Mesh(dp=4), layouts.zero2("dp"), 2 * moved(4) * TIED_ALL),
        (ff.Mesh(dp=2), layouts.fsdp("dp"), tied(2)),
        (ff.Mesh(dp=8), layouts.fsdp("dp"), tied(8)),
        (ff.Mesh(r=2, s=4), layouts.hsdp("r", "s"), tied(4) + 2 * moved(2) * TIED_ALL / 4),
    ],
    ids=["ddp", "zero1", "zero2", "fsdp 2", "fsdp 8", "hsdp"],
)
def test_a_table_of_two_uses_is_gathered_and_reduced_once(mesh: ff.Mesh, layout: ff.Layout, bound: float) -> None:
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens}
    optimizer, template = ff.adamw(1e-3), llama.template(TIED)
    step = ff.compile_step(llama.loss(TIED), optimizer, template=template, mesh=mesh, layout=layout, batch=batch)
    # Sum, count and norm travel in float64.
    assert sum(c.sent_bytes for c in step.collectives() if c.dtype != torch.float64) == bound
