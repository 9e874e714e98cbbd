"""What a user sees of the package itself: names, reprs, and messages about options."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.errors import OptionError
from fx_feather.settings import OneOf, count, meant

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = {"w": ff.Param("embed mlp", (4, 8)), "b": ff.Param("mlp", (8,))}


def loss(params, batch):
    return (batch @ params["w"] + params["b"]).pow(2).sum(), torch.tensor(batch.shape[0])


def stepped(**options):
    setup = {"template": TEMPLATE, "mesh": ff.Mesh(dp=2), "layout": layouts.ddp("dp"), "batch": torch.ones(4, 4)}
    return ff.compile_step(loss, ff.adamw(lr=0.1), **{**setup, "batch_dims": "batch embed", **options})


def test_public_names_are_no_modules_of_the_package():
    modules = {n for n in ff.__all__ if isinstance(getattr(ff, n), types.ModuleType)}
    assert modules == {"hf", "layouts", "testing", "tree"}
    assert {n for n in dir(ff) if not n.startswith("_")} == set(ff.__all__)


def test_the_version_is_that_of_the_project():
    assert f'version = "{ff.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_layouts_have_types():
    assert (ROOT / "layouts" / "py.typed").exists()


def test_layouts_are_one_package_under_two_names():
    assert ff.layouts is layouts


def test_a_folder_that_hides_the_layouts_is_named(tmp_path):
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "__init__.py").write_text("mine = True\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import layouts\nfrom fx_feather import layouts as own\nprint(layouts.mine, own.ddp('dp').compute)\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=120, check=True)
    assert out.stdout == "True {'batch': ('dp',)}\n"
    assert f"{tmp_path / 'layouts' / '__init__.py'} hides the package `layouts`" in out.stderr
    assert "from fx_feather import layouts" in out.stderr


def test_what_is_printed_is_short():
    step = stepped()
    state = step.init(seed=0)
    assert repr(step).startswith("<Step on Mesh(dp=2): 2 parameters of 40 elements; 2 collectives that send ")
    assert repr(state) == (
        "<State after step 0: 2 parameters of 40 elements and 5 tensors of the optimizer, whole values>"
    )
    state.take()
    assert repr(state) == "<State after step 0, taken over by a later step>"
    compiled = ff.compile(loss, template=TEMPLATE, mesh=ff.Mesh(dp=1), layout=layouts.single(), batch=torch.ones(4, 4))
    assert repr(compiled).startswith("<Compiled on Mesh(dp=1): 2 parameters of 40 elements; 0 collectives")


@pytest.mark.parametrize(
    ("key", "value", "fine", "fix"),
    [
        ("accumulate", "4", count(1), "accumulate=4"),
        ("accumulate", 4.0, count(1), "accumulate=4"),
        ("accumulate", torch.tensor(4), count(1), "accumulate=4"),
        ("accumulate", "-4", count(1), None),
        ("accumulate", "four", count(1), None),
        ("accumulate", 4.5, count(1), None),
        ("remat", "ful", OneOf(("none", "selective", "full"), 0), "remat='full'"),
        ("remat", "1000", OneOf(("none", "selective", "full"), 0), "remat=1000"),
        ("backend", "Inductor", OneOf(("eager", "inductor")), "backend='inductor'"),
        ("backend", "xla", OneOf(("eager", "inductor")), None),
    ],
)
def test_a_fix_keeps_what_was_meant(key, value, fine, fix):
    assert meant(key, value, fine) == fix


def test_fixes_of_options_are_printed_and_work():
    with pytest.raises(OptionError) as caught:
        stepped(accumulate="2", remat="ful", prefetch_bytes=1e6)
    text = str(caught.value)
    for fix in ("accumulate=2", "remat='full'", "prefetch_bytes=1000000"):
        assert f"fix:     {fix}\n" in text + "\n"
    stepped(accumulate=2, remat="full", prefetch_bytes=1000000)


@pytest.mark.parametrize("make", [ff.compile_step, ff.compile])
def test_an_unknown_option_is_named_with_the_nearest(make):
    with pytest.raises(OptionError) as caught:
        make(loss, layuot=layouts.single(), backnd="eager", zzz=1)
    text = str(caught.value)
    assert "3 problems" in text and "'layuot' is not an option of" in text and "fix:     layout=Layout(" in text
    assert "fix:     backend='eager'" in text and "fix:     leave it out" in text


@pytest.mark.parametrize("seed", [{"w": torch.ones(4, 8)}, "1", None, 1.5])
def test_a_seed_is_an_integer_and_no_parameters(seed):
    with pytest.raises(OptionError, match="a seed is an integer") as caught:
        stepped().init(seed)
    assert ("seed=1" if seed == "1" else "params=params") in str(caught.value)
