"""What a program says of itself: every function once, with its calls, collectives and bytes."""

import itertools
import linecache
import re
from typing import Any

import torch

import fx_feather as ff
import layouts
from fx_feather.models import llama

CFG = llama.LlamaConfig(vocab=16, layers=3, embed=8, heads=2, kv_heads=2, mlp=16)


def _step(mesh: ff.Mesh, layout: ff.Layout) -> ff.Step:
    tokens = torch.zeros(4, 4, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens}
    template = llama.template(CFG)
    return ff.compile_step(llama.loss(CFG), ff.adamw(lr=1e-3), template=template, mesh=mesh, layout=layout, batch=batch)


def test_each_block_is_named_once_with_its_calls_and_collectives() -> None:
    text = _step(ff.Mesh(fsdp=2), layouts.fsdp("fsdp")).explain()
    assert text.startswith("program for Mesh(fsdp=2), 2 ranks")
    assert re.search(r"layer\.forward +3 x +\d+ operators", text)
    # Gathered before the forward and again before the backward, once a layer.
    assert re.search(r"layer\.gather +6 x +\d+ operators  all_gather@fsdp of [\d.]+ KiB float32", text)
    assert re.search(r"layer\.reduce +3 x +\d+ operators  reduce_scatter@fsdp of [\d.]+ KiB float32", text)


def test_the_bytes_of_a_section_are_those_of_its_collectives() -> None:
    step = _step(ff.Mesh(dp=2), layouts.ddp("dp"))
    sent = sum(c.sent_bytes for c in step.program.collectives("finish"))
    line = next(x for x in step.explain().splitlines() if x.startswith("finish"))
    assert f"{len(step.program.collectives('finish'))} collectives, {sent / 1024:.1f} KiB sent a rank" in line


def test_one_rank_communicates_nothing() -> None:
    text = _step(ff.Mesh(), layouts.single()).explain()
    assert "1 rank\n" in text
    assert all("0 collectives, 0 B sent" in x for x in text.splitlines() if re.match(r"\w+: ", x))


def test_what_runs_beside_a_collective_is_named() -> None:
    text = _step(ff.Mesh(fsdp=2), layouts.fsdp("fsdp")).explain()
    (gather,) = (x for x in text.splitlines() if x.lstrip().startswith("layer.gather"))
    assert "layer.forward" in gather.split("beside")[1] and "layer.backward" in gather
    (reduce,) = (x for x in text.splitlines() if x.lstrip().startswith("layer.reduce"))
    assert "beside layer.backward" in reduce
    batch = torch.zeros(4, 4, dtype=torch.long)
    settings = {"template": llama.template(CFG), "mesh": ff.Mesh(fsdp=2), "layout": layouts.fsdp("fsdp")}
    alone = ff.compile_step(
        llama.loss(CFG),
        ff.adamw(lr=1e-3),
        **settings,
        batch={"tokens": batch, "targets": batch, "positions": batch},
        prefetch_bytes=0,
    )
    (gather,) = (x for x in alone.explain().splitlines() if x.lstrip().startswith("layer.gather"))
    assert "beside" not in gather


def test_the_text_has_the_users_lines_and_dim_names_and_the_fingerprint_no_line() -> None:
    template = {"w": ff.Param("embed mlp", (4, 8)), "v": ff.Param("mlp embed", (8, 4))}

    def compiled(source: str) -> ff.Step:
        scope: dict[str, Any] = {"torch": torch}
        linecache.cache["model.py"] = (len(source), None, source.splitlines(keepends=True), "model.py")
        exec(compile(source, "model.py", "exec"), scope)
        return ff.compile_step(
            scope["loss"], ff.sgd(lr=0.1), template=template, mesh=ff.Mesh(dp=2, tp=2), batch=torch.ones(4, 4),
            layout=layouts.fsdp("dp") | layouts.tp("tp"), batch_dims="batch embed",
        )  # fmt: skip

    source = """def loss(p, x):
    h = x @ p["w"]
    h = torch.relu(h)
    return (h @ p["v"]).sum(), torch.tensor(4.0)
"""
    step = compiled(source)
    text = step.program.text()
    assert "f32[4@dp, 8@tp] (embed mlp)" in text
    forward = text[text.index("loss.forward:") :].split("\n\n")[0].splitlines()
    shown = [
        (above.strip(), line.split(" = ")[-1].split("(")[0])
        for above, line in itertools.pairwise(forward)
        if "# model.py" in above
    ]
    assert shown == [
        ('# model.py:2: h = x @ p["w"]', "aten.mm.default"),
        ("# model.py:3: h = torch.relu(h)", "aten.relu.default"),
        ('# model.py:4: return (h @ p["v"]).sum(), torch.tensor(4.0)', "aten.mm.default"),
    ]
    assert "#" not in step.program.text(lines=False)
    moved = compiled("\n\n" + source)
    assert moved.program.fingerprint() == step.program.fingerprint()
    assert moved.program.text() != text


def test_an_evaluation_says_what_runs_beside_what() -> None:
    tokens = torch.zeros(4, 4, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens}

    def evaluated(params: Any, batch: Any) -> Any:
        return llama.loss(CFG)(params, batch)[0]

    f = ff.compile(
        evaluated, template=llama.template(CFG), mesh=ff.Mesh(fsdp=2), layout=layouts.fsdp("fsdp"), batch=batch
    )
    (line,) = [x for x in f.explain().splitlines() if x.strip().startswith("layer.gather")]
    assert line.endswith("beside evaluated, layer"), line
