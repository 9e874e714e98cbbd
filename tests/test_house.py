"""The laws of the house: who may import whom, how long a file is, what no file may do."""

import ast
import inspect
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fx_feather
import layouts

ROOT = Path(__file__).resolve().parent.parent

# Who may import whom, lowest first: a module imports from its own floor and from those below it. A module is a file or
# a folder directly in fx_feather/. A new one is put on a floor here, as low as it can be.
FLOORS = (
    {"errors"},
    {
        "settings",
        "sampling",
        "tree",
        "data",
        "metrics",
        "mesh",
        "backend",
        "garbage",
        "reuse",
        "identity",
        "heap",
        "finite",
        "inductor",
        "unbuffered",
        "tiles",
        "watch",
    },
    {"state", "deferred", "spec", "channel", "world"},
    {"initializers", "param", "shared", "agreement"},
    {"layout"},
    {"effect"},
    {"collectives", "kernels"},
    {"rules"},
    {"unit", "source", "functions", "pure", "memory", "constants", "custom", "random_ops", "draws", "random"},
    {"record", "functional", "trace"},
    {"nn", "models", "optim", "scan", "module"},
    {"program"},
    {"passes"},
    {"transport"},
    {"runtime", "simulate", "price", "checkpoint", "explain", "hf"},
    {"pipeline"},
    {"inputs", "manual", "advance"},
    {"compiled", "shard_map"},
    {"compiler", "step"},
    {"testing", "generate"},
    {"layouts"},
)
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}

# A model is written for one device: of fx_feather it knows no more than this.
MODEL_MAY_IMPORT = {"errors", "tree", "initializers", "param", "kernels", "trace", "nn", "models"}

# Layouts and examples use what any user uses: the names of fx_feather itself, and these parts of it.
USER_MAY_IMPORT = {"data", "metrics", "models", "nn", "testing"}

MAY_IMPORT_DISTRIBUTED = {"runtime", "transport", "checkpoint", "world"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
NAMED_FOR_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc", "base", "stuff", "lib"}


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, at its top or inside a function, relative names made whole.

    `from a import b` gives `a.b`, since b may be a module.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = (*package[: len(package) - node.level + 1],) if node.level else ()
            parts = (*origin, *(node.module or "").split(".")) if node.module else origin
            yield from ((node.lineno, ".".join((*parts, alias.name))) for alias in node.names)


def dotted(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every `a.b.c` in the code of a file."""
    for node in ast.walk(parsed(path)):
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name):
            yield node.lineno, ".".join([at.id, *reversed(parts)])


def below(dotted_name: str, package: str) -> bool:
    return dotted_name == package or dotted_name.startswith(package + ".")


def module_of(path: Path) -> str:
    """The module of fx_feather that a file belongs to: `mesh` for mesh.py, `nn` for all of nn/."""
    return path.relative_to(ROOT / "fx_feather").parts[0].removesuffix(".py")


def siblings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of what a file imports from fx_feather; the package itself is the module `__init__`."""
    modules = {module_of(p) for p in python_files("fx_feather")}
    for line, imported in imports(path):
        if below(imported, "fx_feather"):
            parts = imported.split(".")
            yield line, parts[1] if len(parts) > 1 and parts[1] in modules else "__init__"


def internal() -> list[Path]:
    return [p for p in python_files("fx_feather") if module_of(p) != "__init__"]


def test_every_module_has_a_floor():
    missing = sorted({module_of(p) for p in internal()} - FLOOR.keys())
    assert not missing, f"put {missing} on a floor of FLOORS, as low as their imports allow"


def test_lower_floors_know_no_higher_ones():
    wrong = []
    for path in internal():
        own = module_of(path)
        for line, other in siblings(path):
            if FLOOR.get(other, 99) > FLOOR.get(own, 99) or (other == "__init__" and own != "testing"):
                wrong.append(f"{name(path)}:{line}: {own} imports {other}, which is above it")
    assert not wrong, "\n".join(wrong)


def test_ranks_give_each_other_bytes_and_no_objects():
    """What torch.distributed calls an object is unpickled by who gets it."""
    wrong = [
        f"{name(path)}:{line}: {attribute}"
        for path in python_files("fx_feather", "layouts", "examples")
        for line, attribute in dotted(path)
        if attribute.endswith(("_object", "_object_list"))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other():
    graph: dict[str, set[str]] = {}
    for path in internal():
        graph.setdefault(module_of(path), set()).update(m for _, m in siblings(path) if m != module_of(path))
    reach = {m: set(others) for m, others in graph.items()}
    for middle, start in itertools.product(graph, graph):  # Warshall: the middle is the outer loop
        if middle in reach[start]:
            reach[start] |= reach[middle]
    cycles = sorted(m for m in graph if m in reach[m])
    assert not cycles, f"these modules import each other in a ring: {cycles}"


def test_models_know_nothing_of_parallelism():
    wrong = [
        f"{name(path)}:{line}: imports {other}"
        for path in python_files("fx_feather/nn", "fx_feather/models")
        for line, other in siblings(path)
        if other not in MODEL_MAY_IMPORT
    ]
    assert not wrong, "\n".join(wrong)


def test_users_code_uses_public_names_only():
    wrong = [
        f"{name(path)}:{line}: imports fx_feather.{other}"
        for path in python_files("layouts", "examples")
        for line, other in siblings(path)
        if other != "__init__" and other not in USER_MAY_IMPORT
    ]
    wrong += [
        f"{name(path)}:{line}: {used} is private"
        for path in python_files("layouts", "examples")
        for line, used in dotted(path)
        if used.split(".")[0] in {"ff", "fx_feather", "layouts"} and any(p.startswith("_") for p in used.split(".")[1:])
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_distributed_stays_in_its_place():
    wrong = [
        f"{name(path)}:{line}: {used}"
        for path in python_files("fx_feather", "layouts")
        if path.parts[-2] == "layouts" or module_of(path) not in MAY_IMPORT_DISTRIBUTED
        for line, used in (*imports(path), *dotted(path))
        if below(used, "torch.distributed") or below(used, "torch._C._distributed_c10d")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_unpickled():
    wrong = [
        f"{name(path)}:{line}: {used}"
        for path in python_files("fx_feather", "layouts", "examples")
        for line, used in (*imports(path), *dotted(path))
        if used.split(".")[0] in UNPICKLERS
        or used in {"torch.load", "torch.save", "torch.serialization", "np.load", "numpy.load"}
    ]
    assert not wrong, "\n".join(wrong)


def test_partial_has_one_meaning():
    wrong = [
        f"{name(path)}:{node.lineno}: write `import functools as ft`"
        for path in python_files("fx_feather", "layouts", "examples", "tests")
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.ImportFrom) and node.module == "functools")
        or (isinstance(node, ast.Import) and any(a.name == "functools" and a.asname != "ft" for a in node.names))
    ]
    assert not wrong, "\n".join(wrong)


def test_files_fit_in_a_few_screens():
    limits = ((400, python_files("fx_feather", "layouts", "examples")), (600, python_files("tests")))
    long = [
        f"{name(path)} has {lines} lines, {limit} at most"
        for limit, paths in limits
        for path in paths
        if (lines := len(path.read_text().splitlines())) > limit
    ]
    assert not long, "\n".join(long)


def test_every_module_says_what_it_is_for():
    silent = []
    for path in python_files("fx_feather", "layouts", "examples", "tests"):
        first = (ast.get_docstring(parsed(path)) or "").split("\n\n")[0].strip()
        if not first.endswith((".", ":")):
            silent.append(f"{name(path)} does not open with one sentence that says what it is for: {first!r}")
    assert not silent, "\n".join(silent)


def test_no_file_is_named_for_nothing():
    vague = [
        name(path)
        for path in python_files("fx_feather", "layouts", "examples", "tests")
        if {path.stem.strip("_"), *path.stem.split("_"), path.parent.name} & NAMED_FOR_NOTHING
    ]
    assert not vague, f"one idea a file, named by its noun: {vague}"


def test_public_names_are_nothing_but_reexports():
    tree = parsed(ROOT / "fx_feather" / "__init__.py")
    other = [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in tree.body[1:]
        if not (
            isinstance(node, ast.ImportFrom | ast.Import)
            or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {"__all__", "__dir__", "__version__"})
        )
    ]
    assert not other, f"fx_feather/__init__.py holds more than imports: {other}"


def test_every_public_name_is_explained():
    silent = []
    for public in (fx_feather, layouts):
        for label, thing in vars(public).items():
            if label.startswith("_") or not (inspect.isclass(thing) or callable(thing)):
                continue
            if not thing.__doc__:
                silent.append(f"{public.__name__}.{label}")
            methods = vars(thing).items() if inspect.isclass(thing) else ()
            silent += [
                f"{public.__name__}.{label}.{method}"
                for method, code in methods
                if not method.startswith("_") and (inspect.isroutine(code) or isinstance(code, property))
                if not inspect.getdoc(getattr(thing, method))
            ]
    assert not silent, f"public names without a docstring: {silent}"


IMPORTED = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import fx_feather
seconds = time.process_time() - start
print(seconds)
print(*sorted(m for m in set(sys.modules) - before if m.split(".")[:2] == ["torch", "distributed"]))
print(torch.distributed.is_available() and torch.distributed.is_initialized())
"""


def test_import_starts_nothing_and_is_quick():
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, distributed, started = done.stdout.splitlines()
    assert not distributed, f"import fx_feather brings {distributed}, which import torch alone does not"
    assert started == "False"
    assert float(seconds) < 3, f"import fx_feather takes {seconds} s of processor time after import torch"


# The laws read code, so each reader is shown code that breaks its law.


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A project of one good file to which a test adds a bad one."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("fx_feather/__init__.py", '"""A package."""\nfrom .mesh import Mesh as Mesh\n')
    write("fx_feather/mesh.py", '"""A mesh."""\nfrom .errors import MeshError\n')
    write("fx_feather/errors.py", '"""Errors."""\n')
    return write


@pytest.mark.parametrize(
    ("law", "path", "code"),
    [
        (test_every_module_has_a_floor, "fx_feather/novel.py", ""),
        (test_lower_floors_know_no_higher_ones, "fx_feather/errors.py", "from . import mesh"),
        (test_lower_floors_know_no_higher_ones, "fx_feather/errors.py", "def f():\n    from .mesh import Mesh"),
        (test_lower_floors_know_no_higher_ones, "fx_feather/nn/mlp.py", "import fx_feather as ff"),
        (test_no_two_modules_import_each_other, "fx_feather/errors.py", "import fx_feather.mesh"),
        (test_models_know_nothing_of_parallelism, "fx_feather/nn/mlp.py", "from ..mesh import Mesh"),
        (test_users_code_uses_public_names_only, "layouts/ddp.py", "from fx_feather.mesh import Mesh"),
        (test_users_code_uses_public_names_only, "examples/a.py", "ff.mesh._secret()"),
        (test_torch_distributed_stays_in_its_place, "fx_feather/mesh.py", "import torch.distributed"),
        (test_torch_distributed_stays_in_its_place, "layouts/ddp.py", "from torch import distributed"),
        (test_torch_distributed_stays_in_its_place, "fx_feather/a/b.py", "torch.distributed.barrier()"),
        (test_nothing_is_unpickled, "fx_feather/checkpoint.py", "import pickle"),
        (test_nothing_is_unpickled, "examples/a.py", "x = torch.load('x')"),
        (test_partial_has_one_meaning, "fx_feather/mesh.py", "from functools import partial"),
        (test_files_fit_in_a_few_screens, "fx_feather/mesh.py", "\n" * 400),
        (test_every_module_says_what_it_is_for, "tests/test_mesh.py", None),
        (test_no_file_is_named_for_nothing, "fx_feather/tensor_utils.py", ""),
        (test_public_names_are_nothing_but_reexports, "fx_feather/__init__.py", "def f(): ..."),
    ],
)  # fmt: skip
def test_each_law_can_fail(house, law, path, code):
    if path != "fx_feather/__init__.py":
        law()
    house(path, "x = 1\n" if code is None else f'"""A file."""\n{code}\n')
    with pytest.raises(AssertionError):
        law()
