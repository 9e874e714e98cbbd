"""The programs that layouts make: number, kind and bytes of the collectives of a step, as each layout promises."""

import functools as ft
import itertools
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.models import llama

CFG = llama.LlamaConfig(vocab=16, layers=2, embed=8, heads=4, kv_heads=2, mlp=16)
ROWS, SEQ, WIDTH = 16, 8, 4  # WIDTH: bytes of an fp32 number
TEMPLATE = llama.template(CFG)


def size(part: Any) -> int:
    """Bytes of some parameters in fp32."""
    return WIDTH * sum(p.numel for p in tree.leaves(part))


TOTAL, BLOCK, EMBED = size(TEMPLATE), size(TEMPLATE["layers"][0]), size(TEMPLATE["embed"])
HEAD = size([TEMPLATE["head"], TEMPLATE["norm"]])
RESIDUAL = WIDTH * ROWS * SEQ * CFG.embed
A_NUMBER_A_TOKEN = WIDTH * ROWS * SEQ


@ft.cache
def compiled(layout: str, sizes: tuple[tuple[str, int], ...], **settings: Any) -> ff.Step:
    batch = {name: torch.zeros(ROWS, SEQ, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
    return ff.compile_step(
        llama.loss(CFG),
        ff.sgd(lr=0.1),
        template=TEMPLATE,
        mesh=ff.Mesh(**dict(sizes)),
        layout=LAYOUTS[layout],
        batch=batch,
        **settings,
    )


LAYOUTS = {
    "single": layouts.single(),
    "ddp": layouts.ddp("dp"),
    "zero1": layouts.zero1("dp"),
    "zero2": layouts.zero2("dp"),
    "fsdp": layouts.fsdp("dp"),
    "hsdp": layouts.hsdp("r", "dp"),
    "tp": layouts.tp("tp"),
    "tp_sp": layouts.tp_sp("tp"),
    "fsdp | mixed": layouts.fsdp("dp") | layouts.mixed(),
    "hsdp | tp_sp | mixed": layouts.hsdp("r", "dp") | layouts.tp_sp("tp") | layouts.mixed(),
}

DP2, DP4, TP2 = (("dp", 2),), (("dp", 4),), (("tp", 2),)


def collectives(step: ff.Step, section: str, *kinds: str) -> list[str]:
    """The collectives of a section, as `function: name@axes bytes dtype`, or those of some functions."""
    return [
        f"{i.func.name}: {c}"
        for i in step.program.sections[section].instrs
        for c in i.func.collectives()
        if not kinds or i.func.name.endswith(kinds)
    ]


#: Bytes of the sum and count of the loss and of two numbers that ranks compare, which travel together.
SCALARS = 32


def sum_and_count(axes: str) -> list[str]:
    return [f"results: psum@{axes} 32 B float64"]


def test_single_sends_nothing() -> None:
    assert compiled("single", DP2).collectives() == []


def test_ddp_reduces_every_gradient_once() -> None:
    step = compiled("ddp", DP4)
    assert [*map(repr, step.collectives())] == [
        f"psum@dp {TOTAL} B float32",
        "psum@dp 32 B float64",
    ]
    assert step.collectives()[0].sent_bytes == 2 * TOTAL * 3 // 4


def test_ddp_accumulates_before_it_reduces() -> None:
    step = compiled("ddp", DP2, accumulate=4)
    assert collectives(step, "first") == collectives(step, "following") == []
    assert collectives(step, "finish") == [f"reduce: psum@dp {TOTAL} B float32", *sum_and_count("dp")]


@pytest.mark.parametrize("limit", [1, 600, 2000])
def test_buckets_are_filled_to_a_limit(limit: int) -> None:
    sizes = [WIDTH * p.numel for p in tree.leaves(TEMPLATE)]

    def buckets(step: ff.Step, section: str) -> list[int]:
        found = [c.operand_bytes for c in step.program.collectives(section) if c.dtype == torch.float32]
        assert all(b <= limit or b in sizes for b in found), "only a parameter that is larger travels alone"
        return found

    at_the_end = buckets(compiled("ddp", DP2, accumulate=2, bucket_bytes=limit), "finish")
    assert sum(at_the_end) == TOTAL
    assert all(a + b > limit for a, b in itertools.pairwise(at_the_end)), "two buckets would fit into one"
    # With one microbatch, full buckets are reduced while the rest of the backward runs.
    step = compiled("ddp", DP2, bucket_bytes=limit)
    meanwhile = buckets(step, "first")
    assert meanwhile and sum(meanwhile) + sum(buckets(step, "finish")) == TOTAL


def test_zero1_scatters_gradients_and_gathers_parameters_once() -> None:
    step = compiled("zero1", DP4, accumulate=2)
    assert collectives(step, "first") == collectives(step, "following") == []
    assert collectives(step, "finish") == [f"reduce: reduce_scatter@dp {TOTAL} B float32", *sum_and_count("dp")]
    assert collectives(step, "check") == ["root_of_sum: psum@dp 8 B float64"]
    assert collectives(step, "update") == [f"store: all_gather@dp {TOTAL // 4} B float32"]
    assert sum(c.sent_bytes for c in step.collectives() if c.operand_bytes > SCALARS) == 2 * TOTAL * 3 // 4


def test_zero2_scatters_gradients_in_each_microbatch() -> None:
    step = compiled("zero2", DP2, accumulate=2)
    scattered = [
        f"loss.reduce: reduce_scatter@dp {HEAD} B float32",
        *[f"layer.reduce: reduce_scatter@dp {BLOCK} B float32"] * CFG.layers,
        f"loss.reduce: reduce_scatter@dp {EMBED} B float32",
    ]
    assert collectives(step, "first") == collectives(step, "following") == scattered
    assert collectives(step, "finish") == sum_and_count("dp")
    assert collectives(step, "update") == [f"store: all_gather@dp {TOTAL // 2} B float32"]


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_gathers_a_block_before_its_use_and_scatters_its_gradients(reshard: bool) -> None:
    step = compiled("fsdp", DP2, reshard=reshard)
    gathers = collectives(step, "first", "gather")
    block = f"layer.gather: all_gather@dp {BLOCK // 2} B float32"
    assert gathers[: CFG.layers + 2] == [
        f"loss.gather: all_gather@dp {EMBED // 2} B float32",
        *[block] * CFG.layers,
        f"loss.gather: all_gather@dp {HEAD // 2} B float32",
    ]
    # The head's parameters are still there when its backward begins, and the embedding's backward needs no table.
    assert gathers[CFG.layers + 2 :] == ([block] * CFG.layers if reshard else [])
    assert collectives(step, "first", "reduce") == [
        f"loss.reduce: reduce_scatter@dp {HEAD} B float32",
        *[f"layer.reduce: reduce_scatter@dp {BLOCK} B float32"] * CFG.layers,
        f"loss.reduce: reduce_scatter@dp {EMBED} B float32",
    ]
    assert collectives(step, "first", "forward", "backward") == []
    assert collectives(step, "finish") == sum_and_count("dp")
    assert collectives(step, "update") == []


def test_hsdp_scatters_each_microbatch_and_reduces_once() -> None:
    step = compiled("hsdp", (("r", 2), ("dp", 2)), accumulate=4)
    names = [(c.name, c.axes) for c in step.collectives() if c.operand_bytes > 8]
    assert names.count(("reduce_scatter", ("dp",))) == 4 * (CFG.layers + 2)
    assert names.count(("psum", ("r",))) == 1
    assert collectives(step, "finish") == [f"reduce: psum@r {TOTAL // 2} B float32", *sum_and_count("r,dp")]
    assert {axes for name, axes in names if name != "psum"} == {("dp",)}


def test_tp_reduces_twice_a_block_forward_and_twice_backward() -> None:
    step = compiled("tp", TP2)
    summed = f"psum@tp {RESIDUAL} B float32"
    assert collectives(step, "first", "forward") == [
        f"loss.forward: {summed}",
        *[f"layer.forward: {summed}"] * (2 * CFG.layers),
        f"loss.forward: pmax@tp {A_NUMBER_A_TOKEN} B float32",
        f"loss.forward: psum@tp {A_NUMBER_A_TOKEN} B float32",
    ]
    assert collectives(step, "first", "backward") == [
        f"loss.backward: {summed}",
        *[f"layer.backward: {summed}"] * (2 * CFG.layers),
    ]
    assert len(collectives(step, "first")) == 4 + 4 * CFG.layers
    # The loss is left pending by the ranks that hold parts of the vocabulary; the count is known to all.
    assert collectives(step, "finish") == ["results: psum@tp 24 B float64"]
    assert collectives(step, "update") == []


def test_sequence_parallel_gathers_and_scatters_twice_a_block_each_way() -> None:
    step = compiled("tp_sp", TP2)
    half = [f"all_gather@tp {RESIDUAL // 2} B float32", f"reduce_scatter@tp {RESIDUAL} B float32"]
    assert collectives(step, "first", "layer.forward") == [f"layer.forward: {c}" for c in half * 2 * CFG.layers]
    assert collectives(step, "first", "layer.backward") == [f"layer.backward: {c}" for c in half * 2 * CFG.layers]
    assert collectives(step, "first", "loss.forward") == [
        f"loss.forward: {half[1]}",
        f"loss.forward: {half[0]}",
        f"loss.forward: pmax@tp {A_NUMBER_A_TOKEN} B float32",
        f"loss.forward: psum@tp {A_NUMBER_A_TOKEN} B float32",
    ]
    assert collectives(step, "first", "loss.backward") == [f"loss.backward: {half[1]}", f"loss.backward: {half[0]}"]
    norms = size(
        [TEMPLATE["norm"], *(layer[n] for layer in TEMPLATE["layers"] for n in ("attention_norm", "mlp_norm"))]
    )
    assert collectives(step, "finish") == [f"reduce: psum@tp {norms} B float32", "results: psum@tp 24 B float64"]


def test_mixed_precision_gathers_narrow_and_reduces_gradients_wide() -> None:
    step = compiled("fsdp | mixed", DP2)
    assert {c.split()[-1] for c in collectives(step, "first", "gather")} == {"bfloat16"}
    reductions = [c for c in step.collectives() if c.name in ("psum", "reduce_scatter")]
    assert {c.dtype for c in reductions} == {torch.float32, torch.float64}


def test_every_reduction_of_a_parameter_s_gradient_is_wide_on_each_axis() -> None:
    """Activations are summed in the compute dtype over tp; gradients of parameters in fp32 over every axis."""
    step = compiled("hsdp | tp_sp | mixed", (("r", 2), ("dp", 2), ("tp", 2)), accumulate=2)
    for section in ("first", "following", "finish"):
        for i in step.program.sections[section].instrs:
            if i.func.name.endswith("reduce"):
                assert {c.dtype for c in i.func.collectives()} <= {torch.float32}
    axes = {a for c in step.program.collectives("finish") if c.operand_bytes > SCALARS for a in c.axes}
    assert axes == {"r", "tp"}


def test_the_program_of_many_layers_is_made_of_the_functions_of_one() -> None:
    counts = {}
    for layers in (2, 6):
        cfg = llama.LlamaConfig(vocab=16, layers=layers, embed=8, heads=4, kv_heads=2, mlp=16)
        batch = {name: torch.zeros(ROWS, SEQ, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
        step = ff.compile_step(
            llama.loss(cfg),
            ff.sgd(lr=0.1),
            template=llama.template(cfg),
            mesh=ff.Mesh(dp=2),
            layout=LAYOUTS["fsdp"],
            batch=batch,
        )
        first = step.program.sections["first"]
        counts[layers] = len({i.func for i in first.instrs})
        assert [i.func.name for i in first.instrs].count("layer.forward") == layers
    assert counts[2] == counts[6]
