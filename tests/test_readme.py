"""The README is true: its Python runs and prints what it says, and what it names is there."""

import contextlib
import doctest
import inspect
import io
import linecache
import re
from pathlib import Path
from typing import Any

import pytest

import fx_feather as ff
import layouts
from fx_feather.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Stands above the output of a command, which no test compares; other output is that of the Python above it.
OF_A_COMMAND = "<!-- output of: "


def blocks() -> list[tuple[str, str, str, str | None]]:
    """File name, code, its first line in the README, and the output below, of each block of Python."""
    fences = list(FENCE.finditer(TEXT))
    out = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        shown = following is not None and following[1] == "text"
        if shown and OF_A_COMMAND in TEXT[fence.end() : following.start()]:
            shown = False
        out.append((fence[2] or "README.md", fence[3], fence.start(3), following[3] if shown else None))
    return out


def run(name: str, code: str, start: int, scope: dict[str, Any]) -> str:
    """What a block prints. Its lines have the numbers of its own file, or those of the README."""
    above = 0 if name != "README.md" else TEXT[:start].count("\n")
    source = "\n" * above + code
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    before, printed = dict(scope), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), scope)
        for label, thing in scope.items():
            if label.startswith("test_") and before.get(label) is not thing:
                thing()
    return printed.getvalue()


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A folder for what the README writes, and no rule of its own left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    known = set(RULES)
    yield
    for op in set(RULES) - known:
        del RULES[op]
    for name in ("README.md", "quickstart.py"):
        linecache.cache.pop(name, None)


def test_every_block_of_python_runs_and_prints_what_it_says(clean):
    scope: dict[str, Any] = {"__name__": "__main__"}
    tested = 0
    for name, code, start, wanted in blocks():
        got = run(name, code, start, scope)
        tested += "\ndef test_" in code
        if wanted is not None:
            same = doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)
            assert same, f"{name}, line {TEXT[:start].count(chr(10))}: prints\n{got}\nnot\n{wanted}"
        else:
            assert not got, f"what this prints is not shown: {got}"
    assert tested == 1, "there is one property test"


def test_the_quick_start_is_short():
    (code,) = [code for name, code, *_ in blocks() if name == "quickstart.py"]
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from", "}"))]
    assert len(lines) <= 20


def test_the_property_test_is_short():
    (code,) = [code for _, code, *_ in blocks() if "\ndef test_" in code]
    assert len([x for x in code[code.index("kinds = ") :].splitlines() if x.strip()]) <= 10


def test_every_layout_has_a_row():
    rows = [line for line in TEXT.splitlines() if line.startswith("| `layouts.")]
    first = " ".join(row.split("|")[1] for row in rows)
    named = set(re.findall(r"layouts\.(\w+)", first))
    assert named == {name for name, thing in vars(layouts).items() if inspect.isfunction(thing)}


def test_every_example_has_a_row():
    rows = {m[1] for m in re.finditer(r"^\| `(examples/\S+\.py)` \|", TEXT, re.MULTILINE)}
    assert rows == {f"examples/{p.name}" for p in (ROOT / "examples").glob("*.py")}


def test_public_names_exist():
    missing = {n for n in re.findall(r"\bff\.(\w+)", TEXT) if not hasattr(ff, n)}
    missing |= {n for n in re.findall(r"\blayouts\.(\w+)", TEXT) if not hasattr(layouts, n)}
    assert not missing


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make (\w+)", TEXT))
    assert named >= {"train", "test"} and named <= targets


def test_files_exist():
    named = set(re.findall(r"\b((?:fx_feather|layouts|examples|tests)/[\w/.]*)", TEXT))
    missing = {name for name in named if not (ROOT / name.rstrip(".")).exists()}
    assert len(named) > 10 and not missing


def test_options_exist():
    sources = [ROOT / name for name in ("examples/train.py", "examples/benchmarks/bench.py", "tests/conftest.py")]
    known = {"--standalone", "--nproc-per-node", "--help"}
    known |= {o for p in sources for o in re.findall(r'add(?:_argument|option)\(\s*"(--[\w-]+)"', p.read_text())}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXT)) <= known
