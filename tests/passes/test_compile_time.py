"""The cost of compiling: each distinct block is planned and traced once, so depth and mesh axes hardly count."""

import sys
import time
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.models import llama

BATCH = {name: torch.zeros(8, 8, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
LAYOUTS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "ddp": (ff.Mesh(dp=2), layouts.ddp("dp")),
    "zero1": (ff.Mesh(dp=2), layouts.zero1("dp")),
    "fsdp": (ff.Mesh(dp=2), layouts.fsdp("dp")),
    "fsdp | tp_sp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp")),
    "hsdp | tp_sp": (ff.Mesh(r=2, dp=2, tp=2), layouts.hsdp("r", "dp") | layouts.tp_sp("tp")),
}


#: How many times the work of 8 layers 64 may take, counted in calls and returns of functions.
LIMIT = 1.75


def model(layers: int) -> llama.LlamaConfig:
    return llama.LlamaConfig(vocab=16, layers=layers, embed=8, heads=4, kv_heads=2, mlp=16, qk_norm=True)


def compiled(layers: int, layout: str) -> tuple[ff.Step, float]:
    """A step, and the seconds of this process's own work that compiling it took."""
    cfg, (mesh, table) = model(layers), LAYOUTS[layout]
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(lr=ff.warmup_cosine(1e-2, 2, 10)))
    template, loss = llama.template(cfg), llama.loss(cfg)
    start = time.process_time()
    step = ff.compile_step(loss, optimizer, template=template, mesh=mesh, layout=table, batch=BATCH)
    return step, time.process_time() - start


def sizes(step: ff.Step) -> Counter[tuple[str, int]]:
    """How many functions there are of each name and number of nodes, but for those that take a whole bucket."""
    return Counter((f.name, len(f.graph.nodes)) for f in step.program.funcs() if f.name not in ("reduce", "store"))


def nodes(step: ff.Step) -> int:
    return sum(len(f.graph.nodes) for f in step.program.funcs())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deeper_model_is_made_of_the_same_functions(layout: str) -> None:
    """Only a bucket of more parameters has more nodes: one in and one out for each, and no operator of its own."""
    shallow, deep = compiled(4, layout)[0], compiled(16, layout)[0]
    assert len(shallow.program.funcs()) == len(deep.program.funcs())
    assert sizes(shallow) == sizes(deep)
    buckets = 2 if layout == "zero1" else 1
    assert nodes(deep) - nodes(shallow) <= 2 * buckets * (len(deep.params.types) - len(shallow.params.types))


def test_more_axes_need_no_more_functions_than_they_have_collectives() -> None:
    one, three = (compiled(2, layout)[0].program.funcs() for layout in ("fsdp", "hsdp | tp_sp"))
    assert len(three) <= len(one) + 8


def work(layers: int, layout: str) -> int:
    """The calls and returns that compiling takes, of Python and of C: the same on any machine, however busy."""
    events = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal events
        events += 1

    sys.setprofile(count)
    try:
        compiled(layers, layout)
    finally:
        sys.setprofile(None)
    return events


@pytest.mark.parametrize("layout", ["fsdp", "hsdp | tp_sp"])
def test_64_layers_take_less_than_twice_the_work_of_8(layout: str) -> None:
    compiled(1, layout)  # what a process does once
    few, many = work(8, layout), work(64, layout)
    assert many <= LIMIT * few, f"{many / few:.2f} times"
    assert work(8, layout) == pytest.approx(few, rel=0.01), "the count is one of the program, not of the machine"


def test_32_layers_on_three_axes_compile_within_15_seconds() -> None:
    step, seconds = compiled(32, "hsdp | tp_sp")
    assert seconds < 15
    assert [i.func.name for i in step.program.sections["first"].instrs].count("layer.backward") == 32
