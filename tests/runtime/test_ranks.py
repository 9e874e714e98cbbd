"""Real ranks, a process each, over shared memory or gloo: they give what `simulate` gives; a failure stops them all."""

import json
import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fx_feather as ff
import layouts
from fx_feather import transport, tree
from fx_feather.errors import MeshError
from fx_feather.spec import assemble
from tests.runtime.compositions import COMPOSITIONS, STEPS
from tests.runtime.jobs import compiled_forward, linear_batch, linear_step, whole_values
from tests.runtime.launch import ROOT, Ended, launch

PARTS = ("got:", "problem:", "rule:", "fix:")


def reports(out: Path, ended: list[Ended]) -> list[dict[str, Any]]:
    for r, e in enumerate(ended):
        assert e.code == 0, f"rank {r} ended with {e.code}:\n{e.text}"
    return [json.loads((out / f"rank{r}.json").read_text()) for r in range(len(ended))]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    out = tmp_path_factory.mktemp("four")
    return out, reports(out, launch("world_of_four", 4, out))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    return out, reports(out, launch("world_of_two", 2, out))


def assembled(out: Path, name: str, ranks: int, types: list[ff.Type], mesh: ff.Mesh) -> list[torch.Tensor]:
    parts = [load_file(out / f"{name}{r}.safetensors") for r in range(ranks)]
    return [assemble([p[str(i)] for p in parts], t, mesh) for i, t in enumerate(types)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    return out, reports(out, launch("plain", 4, out, FX_FEATHER_SHARED_MEMORY="0"))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_ranks_train_as_simulated(name, request) -> None:
    trained_as_simulated(name, *request.getfixturevalue("two" if COMPOSITIONS[name].mesh.size == 2 else "four"))


def test_ranks_without_shared_memory_train_as_simulated(plain) -> None:
    trained_as_simulated("fsdp_tp_sp", *plain)


def trained_as_simulated(name: str, out: Path, found: list[dict[str, Any]]) -> None:
    c = COMPOSITIONS[name]
    step = c.step()
    state = step.init(seed=3)
    for i in range(STEPS):
        state, metrics = step.simulate(state, c.batch(i))
        want = [metrics["loss"], metrics["grad_norm"], metrics["count"]]
        for r, report in enumerate(found):
            assert report[name]["history"][i] == pytest.approx(want, rel=1e-12, abs=0), f"step {i}, rank {r}"
    assert [report[name]["step"] for report in found] == [STEPS] * c.mesh.size
    types = [*step.params.at_rest(), *step._state_types]
    got = assembled(out, name, c.mesh.size, types, c.mesh)
    whole = (state.params, state.opt)
    for path, a, b in zip(tree.paths(whole), got, tree.leaves(whole), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        worst = (a - b).double().norm() / b.double().norm().clamp(min=1e-300)
        assert worst <= 1e-12, f"{path}: {worst:.1e}"


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_each_rank_starts_with_its_own_part_of_the_same_values(name, request) -> None:
    _, found = request.getfixturevalue("two" if COMPOSITIONS[name].mesh.size == 2 else "four")
    assert all(report[name]["init_is_shard_of_whole"] for report in found)


def test_a_compiled_forward_is_as_simulated(four) -> None:
    out, _ = four
    c = COMPOSITIONS["fsdp_tp_sp"]
    f = compiled_forward(c)
    want = f.simulate(ff.init(f.template, 3), c.batch())
    parts = [load_file(out / f"forward{r}.safetensors")["logits"] for r in range(4)]
    torch.testing.assert_close(assemble(parts, f.out_types, c.mesh), want, rtol=1e-12, atol=1e-14)


def test_one_call_takes_whole_values_on_ranks_and_in_one_process(two) -> None:
    _, found = two
    want = whole_values()
    for report in found:
        got = report["whole"]
        assert got["step"] == want["step"] == 3
        for a, b in zip(got["history"], want["history"], strict=True):
            assert a == pytest.approx(b, rel=1e-12)
            assert a[0] == a[2], "nothing of what came in was changed"
        for a, b in zip(got["values"], want["values"], strict=True):
            assert a == pytest.approx(b, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("world", ["four", "plain"])
def test_every_collective_is_its_reference(world, request) -> None:
    _, found = request.getfixturevalue(world)
    for report in found:
        assert not report["collectives"]["wrong"]
        assert min(report["collectives"]["tried"].values()) >= 4
        assert set(report["collectives"]["tried"]) == {c.name for c in ff.COLLECTIVES.values() if c.op is not None}


def test_process_groups_do_not_grow_with_layers_and_wait_as_long_as_asked(four) -> None:
    _, found = four
    for report in found:
        one, three = report["groups"]["counts"]
        assert one == three <= 8
        assert set(report["groups"]["timeouts"]) == {120.0}


def five_parts(error: list[str], kind: str) -> str:
    name, text = error
    assert name == kind, text
    assert all(part in text for part in PARTS), text
    return text


def test_a_mesh_of_another_size_than_the_world(two) -> None:
    _, found = two
    for report in found:
        text = five_parts(report["refusals"]["wrong_size"], "MeshError")
        assert "run on Mesh(dp=4)" in text
        assert "the mesh has 4 ranks, the world has 2" in text
        assert "torchrun --nproc-per-node 4 script.py, or simulate(...)" in text


def test_a_mesh_in_one_plain_process() -> None:
    assert "WORLD_SIZE" not in os.environ
    step = linear_step(ff.Mesh(dp=2), layouts.ddp("dp"))
    with pytest.raises(MeshError) as error:
        step(step.init(), linear_batch())
    assert "simulate" in str(error.value)


def test_ranks_that_compiled_different_programs(two) -> None:
    _, found = two
    texts = {five_parts(report["refusals"]["different_programs"], "RankError") for report in found}
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 0: program" in text and "rank 1: program" in text
    assert "2 different programs" in text
    assert "the same model, layout, mesh and batch shapes on every rank" in text


def test_a_nan_on_one_rank_stops_all_and_changes_nothing(two) -> None:
    _, found = two
    texts = {five_parts(report["refusals"]["nan"], "NonFiniteError") for report in found}
    assert len(texts) == 1
    text = texts.pop()
    assert "first leaf with a gradient that is not finite: params['b']" in text
    assert "params['a']" not in text
    assert "loss nan" in text and "the state is unchanged" in text
    step = linear_step(ff.Mesh(dp=2), layouts.fsdp("dp"))
    state, first = step.simulate(step.init(), linear_batch())
    _, second = step.simulate(state, linear_batch())
    for report in found:
        assert report["refusals"]["unchanged"]
        assert report["refusals"]["loss_after"] == pytest.approx(first["loss"], rel=1e-12)
        assert report["refusals"]["loss_then"] == pytest.approx(second["loss"], rel=1e-12)


def test_a_state_used_twice(two) -> None:
    _, found = two
    for report in found:
        text = five_parts(report["refusals"]["used_twice"], "StateError")
        assert "this state was given to an earlier step already" in text
        assert "state, metrics = step(state, batch)" in text


def test_a_whole_batch_where_a_part_belongs(two) -> None:
    _, found = two
    for report in found:
        text = five_parts(report["refusals"]["whole_batch"], "BatchError")
        assert "batch['x']" in text and "batch['y']" in text
        assert "f64[4, 4] is not f64[2, 4]" in text
        assert "step.shard(batch)" in text


def test_a_rank_that_fails_amid_a_section_stops_all(two) -> None:
    """It is not where the others are any more: its next collective would meet another one of theirs."""
    _, (zero, one) = two
    assert [kind for kind, _ in zero["fails_amid"][:2]] == ["nothing", "nothing"]
    assert [kind for kind, _ in one["fails_amid"][:2]] == ["nothing", "RuntimeError"]
    assert "lost another rank" in five_parts(zero["fails_amid"][2], "RankError")
    text = five_parts(one["fails_amid"][2], "RankError")
    assert "an earlier section failed on this rank: RuntimeError: index 9 is out of bounds" in text


def test_ranks_that_disagree(tmp_path) -> None:
    """Each says so at once, and all the same."""
    zero, one = reports(tmp_path, launch("disagreeing", 2, tmp_path))
    cases = {
        "constant": ("RankError", "2 different programs", "rank 1: %", "constant f32[4] sha256"),
        "seed, ddp": ("RankError", "seed 1 on rank 1", "rank 1 differs in the seed"),
        "seed, fsdp": ("RankError", "seed 1 on rank 1", "rank 1 differs in the seed"),
        "leaf": ("RankError", "params['b'], f64[4]: rank 1 not as rank 0", "1 of 5 leaves differ"),
        "not finite": ("NonFiniteError", "first leaf that is not finite: params['b']"),
        "batch": (
            "RankError",
            "batch['x'], f64[4, 4]: rank 1 not as rank 0",
            "2 of 5 leaves differ",
            "step.shard(batch)",
        ),
        "evaluation": ("RankError", "batch['x'], f64[4, 4]: rank 1 not as rank 0", "2 of 4 leaves differ"),
        "other layout": ("StateError", "params['a'] is f64[4], not f64[4@dp]", "step.shard_state(other.whole(state))"),
        "skipped": ("RankError", "step 2 on rank 1", "rank 1 differs in the step"),
    }
    for name, (kind, *words) in cases.items():
        assert zero[name] == one[name]
        text = five_parts(zero[name][:2], kind)
        assert all(word in text for word in words), text
    for report in (zero, one):
        own, shared = report["rows of its own"]
        assert own == shared
        steps, there, here = report["moved"]
        assert steps == 2 and there == pytest.approx(here, rel=1e-12)
        assert report["skipped"][2] == "True", "the state is still there"
        assert "an earlier section failed on this rank: RankError" in five_parts(report["after"], "RankError")


def test_a_forked_child_a_second_thread_and_one_traceback_for_all(tmp_path) -> None:
    ended = launch("apart", 2, tmp_path)
    assert [e.code for e in ended] == [1, 1]
    for r in range(2):
        report = json.loads((tmp_path / f"rank{r}.json").read_text())
        assert "this process was forked from the rank" in five_parts(report["child"], "RankError")
        assert "another thread of this rank is in a collective or step" in five_parts(report["thread"], "RankError")
        assert math.isfinite(report["loss"])
    texts = "".join(e.text for e in ended)
    assert texts.count("Traceback") == 1 and texts.count("loss nan") == 1, texts
    assert texts.count("NonFiniteError: step 1") == 2 and "as on another rank, which shows it all" in texts


def test_torchrun_starts_again_though_a_rank_is_late(tmp_path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "1",
        "--nproc-per-node",
        "2",
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FX_FEATHER_TIMEOUT": "60"}
    job = [*torchrun, "-m", "tests.runtime.jobs", "restarted", str(tmp_path)]
    done = subprocess.run(job, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    assert [f["attempt"] for f in found] == [1, 1] and found[0]["loss"] == found[1]["loss"]


def test_a_killed_rank_ends_the_others(tmp_path) -> None:
    ended = launch("killed", 2, tmp_path, timeout_s=60)
    assert ended[1].code == 7
    (report,) = reports(tmp_path, ended[:1])
    text = five_parts(report["error"], "RankError")
    assert "rank 0 of Mesh(dp=2, one=1) lost another rank" in text
    assert "section 'first' did not complete" in text
    assert report["waited"] < 30


def test_a_stuck_rank_ends_the_others_within_the_timeout(tmp_path) -> None:
    ended = launch("stuck", 2, tmp_path, timeout_s=6, stuck=1)
    assert ended[1].code is None
    (report,) = reports(tmp_path, ended[:1])
    text = five_parts(report["error"], "RankError")
    assert "section 'first' did not complete within 6 s" in text
    assert "FX_FEATHER_TIMEOUT=seconds" in text
    assert 5 < report["waited"] < 20


def test_a_rank_that_never_starts(tmp_path) -> None:
    (ended,) = launch("killed", 2, tmp_path, timeout_s=3, missing=1)
    assert ended.code == 1 and math.isfinite(ended.seconds)
    assert "RankError: rank 0 of Mesh(dp=2, one=1) lost another rank" in ended.text
    assert "the start did not complete within 3 s" in ended.text


def test_old_values_are_gone_while_new_ones_are_made() -> None:
    step = linear_step(ff.Mesh(), ff.Layout())
    state, alive = step.init(), {}
    refs = {k: weakref.ref(v) for k, v in state.params.items()}
    run = step.runtime()

    def watched(section: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = type(run).run(run, section, inputs)
        alive[section.name] = sorted(k for k, ref in refs.items() if ref() is not None)
        return out

    run.run = watched
    step(state, step.shard(linear_batch()))
    assert alive["check"] == ["a", "b"]
    assert alive["update"] == []


def updates(keep: Any, steps: int = 4) -> tuple[list[Any], list[int]]:
    """Parameters after each step of AdamW, and where they lie; `keep` is called with those before each step."""
    weight = ff.Param("embed _", (5, 3), ff.normal(1.0), torch.float64)
    template = {"u": weight, "v": weight, "w": weight, "b": ff.Param("_", (3,), ff.ones(), torch.float64)}

    def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = (batch @ params["u"]).tanh() * (batch @ params["v"]) + batch @ params["w"] + params["b"]
        return (out**2).sum(), torch.tensor(batch.shape[0])

    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(0.1))
    batch = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    settings = {"template": template, "mesh": ff.Mesh(), "layout": ff.Layout(), "batch": batch}
    step = ff.compile_step(loss, optimizer, **settings, batch_dims="batch _", device="cpu")
    state, history, places = step.init(), [], []
    for _ in range(steps):
        keep(state.params)
        state, _ = step(state, batch)
        history.append(tree.map(torch.clone, state.params))
        places.append([x.data_ptr() for x in tree.leaves(state.params)])
    return history, places


def test_an_update_writes_over_what_the_last_one_made() -> None:
    plain, places = updates(lambda params: None)
    assert places[0] == places[1] == places[3]
    # Nothing may change under who holds a value, a view of it or an array on its memory.
    ways = (
        lambda x: x,
        lambda x: x[:1],
        lambda x: x.numpy(),
        lambda x: x.detach(),
        torch.utils.dlpack.to_dlpack,
        # Another process may have it.
        lambda x: x.share_memory_(),
    )
    for way in ways:
        held, before = [], []

        def keep(params: Any, way: Any = way, held: Any = held, before: Any = before) -> None:
            held.append([way(x) for x in tree.leaves(params)])
            before.append(tree.map(torch.clone, params))

        again, _ = updates(keep)
        for a, b in zip(tree.leaves(again), tree.leaves(plain), strict=True):
            assert torch.equal(a, b)
        if isinstance(held[0][0], torch.Tensor):
            for a, b in zip(tree.leaves(held), tree.leaves(before), strict=True):
                assert torch.equal(a, b if a.shape == b.shape else b[:1])


def test_leaves_alike_are_updated_at_once_but_for_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[tuple[str, int]] = Counter()
    for name in ("adamw", "sum_squares"):
        op = getattr(torch.ops.fx_feather, name).default

        def counted(rows: list[Any], name: str = name, many: Any = op.at_once) -> Any:
            calls[name, len(rows)] += 1
            return many(rows)

        monkeypatch.setattr(op, "at_once", counted)
    plain, _ = updates(lambda params: None)
    # The first parameters are those of `init`, which a user may hold.
    assert calls == {("adamw", 1): 3, ("adamw", 3): 3, ("sum_squares", 1): 4, ("sum_squares", 3): 4}
    calls.clear()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    again, _ = updates(lambda params: held.append((params["v"], params["v"].clone())))
    assert calls["adamw", 2] == 3 and ("adamw", 3) not in calls
    for a, b in zip(tree.leaves(again), tree.leaves(plain), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in held)


def test_a_step_does_not_write_over_what_a_user_brings() -> None:
    step = linear_step(ff.Mesh(), ff.Layout())
    state = step.init()
    array = state.params["a"].numpy().copy()
    before = array.copy()
    state.params["a"] = torch.from_numpy(array)
    for _ in range(3):
        state, _ = step(state, step.shard(linear_batch()))
    assert (array == before).all()


@pytest.mark.parametrize("name", ["pscatter", "pad", "keep_first"])
def test_what_a_rank_makes_alone_has_memory_of_its_own(name) -> None:
    """The operand is written over, or freed, as soon as nothing else in the program reads it."""
    x = torch.arange(4.0)
    out = transport.bind(name, transport.Peers([0, 1], 0, x.device), {"dim": 0})(x)
    assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
