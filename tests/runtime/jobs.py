"""What a rank of a small world does, one function a job: `python -m tests.runtime.jobs JOB FOLDER`.

A job writes what it found to `FOLDER/rankN.json`, and tensors to safetensors beside it. The judgement is the test's.
"""

import functools as ft
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.collectives import COLLECTIVES, lockstep
from fx_feather.generate import Generator
from fx_feather.models import llama
from fx_feather.program import Func, Instr
from fx_feather.runtime import Runtime
from fx_feather.sampling import Sampling
from fx_feather.spec import shard
from tests.runtime.compositions import COMPOSITIONS, STEPS, Composition, config

RANK = int(os.environ.get("RANK", "0"))


def caught(call: Callable[..., Any], *args: Any) -> list[str]:
    """The type and text of the error that a call raises."""
    try:
        call(*args)
    except Exception as e:
        return [type(e).__name__, str(e)]
    return ["nothing", ""]


def train(name: str, out: Path) -> dict[str, Any]:
    """Steps of a composition; the local parts of all leaves go to a file."""
    c = COMPOSITIONS[name]
    step = c.step()
    state = step.init(seed=3)
    same = all(
        torch.equal(part, shard(whole, t, c.mesh, RANK))
        for part, whole, t in zip(
            tree.leaves(state.params), tree.leaves(ff.init(step.template, 3)), step.params.at_rest(), strict=True
        )
    )
    history = []
    for i in range(STEPS):
        state, metrics = step(state, step.shard(c.batch(i)))
        history.append([metrics["loss"], metrics["grad_norm"], metrics["count"]])
    leaves = [*tree.leaves(state.params), *tree.leaves(state.opt)]
    save_file({str(i): x.contiguous() for i, x in enumerate(leaves)}, out / f"{name}{RANK}.safetensors")
    return {"history": history, "init_is_shard_of_whole": same, "step": state.step}


def forward(out: Path) -> None:
    """A compiled forward, without any gradient."""
    c = COMPOSITIONS["fsdp_tp_sp"]
    f = compiled_forward(c)
    logits = f(f.init_params(seed=3), f.shard(c.batch()))
    save_file({"logits": logits.contiguous()}, out / f"forward{RANK}.safetensors")


def compiled_forward(c: Composition, layout: ff.Layout | None = None) -> Any:
    """The logits of a composition's model."""
    return ff.compile(
        lambda params, batch: llama.forward(c.config, params, batch["tokens"], batch["positions"]),
        template=llama.template(c.config),
        mesh=c.mesh,
        layout=layout or c.layout,
        batch=c.batch(),
        device="cpu",
    )


def static_arguments(name: str, n: int) -> Iterator[dict[str, Any]]:
    """Arguments that a collective is tried with, for an operand of three dims."""
    match COLLECTIVES[name].static:
        case ("dim",):
            yield from ({"dim": d} for d in range(3))
        case ("split_dim", "concat_dim"):
            yield from ({"split_dim": a, "concat_dim": b} for a in range(3) for b in range(3))
        case ("perm",):
            yield {"perm": [x for i in range(n) for x in (i, (i + 1) % n)]}
            yield {"perm": [0, n - 1]}
            yield {"perm": [0, 0, n - 1, 1] if n > 2 else [1, 1]}
        case _:
            yield {}


def collectives() -> dict[str, Any]:
    """Each collective of the table on real ranks against its reference; what differs, by name and arguments."""
    shared = os.environ.get("FX_FEATHER_SHARED_MEMORY") != "0"
    mesh, wrong, tried = ff.Mesh(a=2, b=2), [], []
    run = Runtime(mesh, "cpu")
    # Few bytes, some, and more than are shown at a time; of the latter one shape is enough.
    # A dim of size 1 is joined by a view, if nobody sees to it that the result is in order.
    shapes = [(4, 4, 4), (4, 4, 60), (4, 4, 40000), (4, 1, 4)]
    for c, shape in itertools.product(COLLECTIVES.values(), shapes):
        size = math.prod(shape)
        values = [torch.arange(size, dtype=torch.float64).reshape(shape).sin() * (r + 1) + r for r in range(4)]
        strided = [v.transpose(0, 2) for v in values]
        if c.op is None or (size > 10_000 and c.name not in ("psum", "pmax")):
            continue
        if 1 in shape and not c.name.startswith("all_gather"):
            continue
        for axes in (("a",), ("b",), ("a", "b"), ("b", "a")):
            n = mesh.count(axes)
            for static in static_arguments(c.name, n):
                for operands in (values, strided) if c.before else (values,):
                    graph = fx_graph(c.op, bool(c.before), ",".join(axes), n, tuple(static.values()))
                    call = Instr(Func("test", graph), ((0,) if c.before else (),), ((1,),), ((),))
                    got = run._callable(call)(*([operands[RANK]] if c.before else []))[0]
                    if c.before:
                        want = lockstep(c.name, operands, mesh, axes, **static)[RANK]
                    else:
                        want = torch.tensor(mesh.index(RANK, axes))
                    fine = got.shape == want.shape and torch.equal(got, want.contiguous()) and got.is_contiguous()
                    # Gloo takes sums in an order of its own.
                    close = c.reduces and not shared and torch.allclose(got, want, rtol=1e-14, atol=1e-14)
                    if not fine and not close:
                        wrong.append(f"{c.name} over {axes} with {static}")
                    tried.append(c.name)
    return {"wrong": wrong, "tried": {name: tried.count(name) for name in dict.fromkeys(tried)}}


def fx_graph(op: Any, operand: bool, *args: Any) -> torch.fx.Graph:
    """A graph of one collective."""
    graph = torch.fx.Graph()
    head = (graph.placeholder("x"),) if operand else ()
    axes, n, static = args
    graph.output([graph.call_function(op, (*head, axes, n, *static))])
    return graph


def groups() -> dict[str, Any]:
    """The number of process groups after programs of 1 and 3 layers over sets of axes, and the timeouts of all."""
    counts, world = [], dist.distributed_c10d._world.pg_map
    for layers in (1, 3):
        c = Composition(ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp"), config(layers=layers))
        f = compiled_forward(c, layouts.fsdp(("dp", "tp")))
        f(f.init_params(), f.shard(c.batch()))
        counts.append(len(world))
    cpu = torch.device("cpu")
    return {"counts": counts, "timeouts": [g._get_backend(cpu).options._timeout.total_seconds() for g in world]}


def linear_step(mesh: ff.Mesh, layout: ff.Layout, features: int = 4) -> ff.Step:
    """A step of a model so small that it compiles at once: two weights, each with data of its own."""
    template = {k: ff.Param("embed", (features,), ff.ones(), torch.float64) for k in ("a", "b")}

    def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch["x"] * params["a"], batch["y"] * params["b"]
        return (x.square() + y.square()).sum(), torch.tensor(batch["x"].shape[0])

    return ff.compile_step(
        loss,
        ff.sgd(lr=0.01),
        template=template,
        mesh=mesh,
        layout=layout,
        batch=linear_batch(features),
        batch_dims="batch embed",
        device="cpu",
    )


def linear_batch(features: int = 4) -> dict[str, torch.Tensor]:
    """Data for `linear_step`."""
    x = torch.arange(4.0 * features, dtype=torch.float64).reshape(4, features)
    return {"x": x / 16, "y": 1 - x / 16}


def refusals() -> dict[str, Any]:
    """What a world of two says to mistakes, each of which it has to survive."""
    mesh, found = ff.Mesh(dp=2), {}
    found["wrong_size"] = caught(lambda: linear_step(ff.Mesh(dp=4), layouts.ddp("dp")).init())
    found["different_programs"] = caught(lambda: linear_step(mesh, layouts.ddp("dp"), features=4 + 2 * RANK).init())
    step = linear_step(mesh, layouts.fsdp("dp"))
    state, good = step.init(), step.shard(linear_batch())
    before = [x.clone() for x in tree.leaves((state.params, state.opt))]
    bad = {k: v.clone() for k, v in good.items()}
    if RANK == 1:
        # The second half of the features rests on rank 1, so rank 0 sees no bad gradient of its own.
        bad["y"][0, 3] = float("nan")
    found["nan"] = caught(step, state, bad)
    after = tree.leaves((state.params, state.opt))
    found["unchanged"] = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    found["whole_batch"] = caught(step, state, linear_batch())
    used, metrics = state, None
    state, metrics = step(state, good)
    found["loss_after"] = metrics["loss"]
    found["used_twice"] = caught(step, used, good)
    found["loss_then"] = step(state, good)[1]["loss"]
    return found


def plain(out: Path) -> dict[str, Any]:
    """Ranks that don't see each other's memory."""
    return {"collectives": collectives(), "fsdp_tp_sp": train("fsdp_tp_sp", out)}


def world_of_four(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"collectives": collectives(), "groups": groups()}
    for name, c in COMPOSITIONS.items():
        if c.mesh.size == 4:
            found[name] = train(name, out)
    forward(out)
    return found


def whole_values() -> dict[str, Any]:
    """One call on whole values, in a world of ranks or in one process: results, and what is left of its inputs."""
    # A size that does not divide, so that parts are padded.
    step, batch = linear_step(ff.Mesh(dp=2), layouts.fsdp("dp"), features=5), linear_batch(5)
    state, history = step.init(seed=1), []
    for _ in range(3):
        before = state
        state, metrics = step.run_whole(before, batch)
        again = step.run_whole(before, batch)[1]
        history.append([metrics["loss"], metrics["grad_norm"], again["loss"]])

    def loss(params: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        x = data["x"] * params["a"] * params["b"]
        return x.square().sum(), torch.tensor(x.shape[0]), {"rows": x.sum(1), "total": x.sum()}

    given = {"mesh": ff.Mesh(dp=2), "layout": layouts.fsdp("dp"), "batch": batch, "batch_dims": "batch embed"}
    g = ff.compile(ff.value_and_grad(loss), template=step.template, **given, device="cpu")
    out = g.run_whole(state.params, batch)
    # Under torchrun these are local parts.
    own = step.whole(step.init(seed=1)).params
    leaves = [*tree.leaves(state.params), *tree.leaves(own), *tree.leaves(out)]
    return {"history": history, "step": state.step, "values": [x.double().reshape(-1).tolist() for x in leaves]}


def fails_amid() -> list[list[str]]:
    """Three calls, in the second of which an operator of rank 1 fails after a collective; what each raises here."""
    template = {"a": ff.Param("embed", (4,), ff.ones(), torch.float64)}
    batch = {"x": torch.ones(4, 4, dtype=torch.float64), "at": torch.zeros(4, 1, dtype=torch.int64)}
    f = ff.compile(
        lambda params, batch: (batch["x"] * params["a"]).gather(1, batch["at"]),
        template=template,
        mesh=ff.Mesh(dp=2),
        layout=layouts.fsdp("dp"),
        batch=batch,
        batch_dims={"x": "batch _", "at": "batch _"},
        device="cpu",
    )
    params, good = f.init_params(), f.shard(batch)
    bad = {**good, "at": good["at"] + 9 * RANK}
    return [caught(f, params, b) for b in (good, bad, good)]


def world_of_two(out: Path) -> dict[str, Any]:
    found = {"ddp": train("ddp", out), "refusals": refusals(), "whole": whole_values()}
    # The last: after it this world is no use.
    return {**found, "fails_amid": fails_amid()}


def failing_world(out: Path, fault: Callable[[], None]) -> dict[str, Any]:
    """One good step of all ranks, then rank 1 fails and the others go on."""
    # A second axis, so that the ranks meet in a group that is not the whole world's own.
    step = linear_step(ff.Mesh(dp=int(os.environ["WORLD_SIZE"]), one=1), layouts.fsdp("dp"), features=6)
    state, batch = step.init(), step.shard(linear_batch(6))
    state, _ = step(state, batch)
    if RANK == 1:
        fault()
    started = time.monotonic()
    error = caught(step, state, batch)
    return {"error": error, "waited": time.monotonic() - started}


def generator(**split: Any) -> Generator:
    """A generator of texts by a small model, split where a mesh and a layout are given."""
    cfg = config(init_std=0.5)
    return Generator(
        ft.partial(llama.extend, cfg), template=llama.template(cfg), cache=llama.cache_template(cfg, 2, 9), **split
    )


def written(generate: Callable[..., Any], params: Any) -> list[Any]:
    """Two texts of unequal prompts, the likeliest and some that are drawn."""
    sampled = Sampling(temperature=1.5, top_p=0.9, seed=2)
    return [generate(params, [[1, 2, 3], [4]], 6, s, stop=[7]) for s in (Sampling(), sampled)]


def generated(out: Path) -> dict[str, Any]:
    generate = generator(mesh=ff.Mesh(tp=2), layout=layouts.tp_sp("tp"), device="cpu")
    texts = written(generate, generate.prefill.init_params(5))
    return {"texts": texts, "same": written(generate.run_whole, ff.init(generate.template, 5)) == texts}


def disagreeing(out: Path) -> dict[str, Any]:
    """What two ranks say that hold other values than they should in common; the last of these ends the world."""
    dp, tp, found = ff.Mesh(dp=2), ff.Mesh(tp=2), {}
    batch = linear_batch()

    def first(step: ff.Step, state: ff.State, data: Any = None) -> list[str]:
        return caught(step, state, data if data is not None else step.shard(batch))

    def constant(params: Any, data: Any) -> torch.Tensor:
        return data["x"] * params["a"] * torch.tensor([RANK, 1.0, 1.0, 1.0])

    given = {"template": linear_step(ff.Mesh(), ff.Layout()).template, "batch": batch, "batch_dims": "batch embed"}
    f = ff.compile(constant, **given, mesh=dp, layout=layouts.ddp("dp"), device="cpu")
    found["constant"] = caught(lambda: f.shard(batch))
    for name, mesh, layout in (("ddp", dp, layouts.ddp("dp")), ("fsdp", dp, layouts.fsdp("dp"))):
        step = linear_step(mesh, layout)
        found[f"seed, {name}"] = first(step, step.init(seed=RANK))
    step = linear_step(dp, layouts.ddp("dp"))
    state = step.init()
    state.params["b"][1] += RANK
    found["leaf"] = first(step, state)
    state.params["b"][1] = float("nan")
    found["not finite"] = first(step, state)
    alike = ff.Layout(unused_ok=True)  # both ranks of `tp` do the same work
    step = linear_step(tp, alike)
    found["batch"] = first(step, step.init(), tree.map(lambda x: x + RANK, batch))
    g = ff.compile(lambda p, b: b["x"] * p["a"], **given, mesh=tp, layout=alike, device="cpu")
    found["evaluation"] = caught(g, g.init_params(), tree.map(lambda x: x + RANK, batch))
    step = linear_step(dp, layouts.ddp("dp"))
    rows = tree.map(lambda x: x[2 * RANK : 2 * RANK + 2], batch)
    state, metrics = step(step.init(), step.from_local(rows))
    found["rows of its own"] = [
        metrics["loss"],
        linear_step(dp, layouts.ddp("dp"))(step.init(), step.shard(batch))[1]["loss"],
    ]
    # A whole state goes from one layout to another; parts of one as they are don't.
    other = linear_step(dp, layouts.fsdp("dp"))
    found["other layout"] = caught(other, state, other.shard(batch))
    moved, metrics = other(other.shard_state(step.whole(state)), other.shard(batch))
    found["moved"] = [moved.step, metrics["loss"], step(state, step.shard(batch))[1]["loss"]]
    # Rank 1 leaves a step out: after the first look, the number of the step alone tells.
    state, _ = step(step.init(), step.shard(batch))
    state.step += RANK
    found["skipped"] = [*caught(step, state, step.shard(batch)), str(state.params is not None)]
    found["after"] = caught(step, state, step.shard(batch))
    return found


def apart(out: Path) -> dict[str, Any]:
    """What a forked child and a second thread of each rank are told; then all ranks fail alike, with a traceback."""
    step = linear_step(ff.Mesh(dp=2), layouts.fsdp("dp"))
    state, batch = step.init(), step.shard(linear_batch())
    child = os.fork()
    if child == 0:
        told = caught(step, state, batch)
        (out / f"child{RANK}.json").write_text(json.dumps(told))
        os._exit(0)
    os.waitpid(child, 0)
    told: list[list[str]] = []
    with step.runtime()._turn("a long step"):
        thread = threading.Thread(target=lambda: told.append(caught(step, state, batch)))
        thread.start()
        thread.join()
    state, metrics = step(state, batch)
    found = {"child": json.loads((out / f"child{RANK}.json").read_text()), "thread": told[0], "loss": metrics["loss"]}
    (out / f"rank{RANK}.json").write_text(json.dumps(found))
    step(state, {**batch, "x": batch["x"] * float("nan")})
    return found


def restarted(out: Path) -> dict[str, Any]:
    """Rank 0 fails in the first attempt, and comes late in the second."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 1 and RANK == 0:
        time.sleep(3)
    step = linear_step(ff.Mesh(dp=2), layouts.fsdp("dp"))
    _, metrics = step(step.init(), step.shard(linear_batch()))
    if attempt == 0 and RANK == 0:
        os._exit(7)
    return {"attempt": attempt, "loss": metrics["loss"]}


def killed(out: Path) -> dict[str, Any]:
    return failing_world(out, lambda: os._exit(7))


def alone_whole(out: Path) -> dict[str, Any]:
    """Rank 0 looks at its whole state, while the other goes on."""
    step = linear_step(ff.Mesh(dp=2), layouts.fsdp("dp"))
    state, _ = step(step.init(), step.shard(linear_batch()))
    if RANK == 0:
        step.whole(state)
    step(state, step.shard(linear_batch()))
    return {}


def alone_first(out: Path) -> dict[str, Any]:
    """Rank 0 evaluates for the first time, while the other goes on."""
    dp, batch = ff.Mesh(dp=2), linear_batch()
    step = linear_step(dp, layouts.fsdp("dp"))
    g = ff.compile(
        lambda p, b: b["x"] * p["a"], template=step.template, mesh=dp, layout=layouts.fsdp("dp"), batch=batch,
        batch_dims="batch embed", device="cpu",
    )  # fmt: skip
    state, _ = step(step.init(), step.shard(batch))
    if RANK == 0:
        g(state.params, g.shard(batch))
    step(state, step.shard(batch))
    return {}


def drawn(out: Path) -> dict[str, Any]:
    """Programs of `cases.json`, run on all ranks: equal, refused, or what went wrong."""
    # Here, since what draws takes seconds to import, and other jobs draw nothing.
    from tests.laws.drawn import Program
    from tests.laws.test_programs import KINDS, check

    found = []
    for case in json.loads((out / "cases.json").read_text()):
        layout = KINDS[case["kind"]]("a")
        try:
            same = check(Program(case["source"], ()), ff.Mesh(a=2), layout, case["parts"], case["remat"])
            found.append("equal" if same else "refused")
        except Exception as e:
            found.append(f"{type(e).__name__}: {e}")
    return {"found": found, "ranks": dist.get_world_size()}


def stuck(out: Path) -> dict[str, Any]:
    return failing_world(out, lambda: time.sleep(600))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    result = globals()[sys.argv[1]](folder)
    (folder / f"rank{RANK}.json").write_text(json.dumps(result))
    if dist.is_initialized() and "error" not in result:
        dist.destroy_process_group()
