"""How all tests run: one thread, hypothesis from fixed seeds or deep by flag, and a count of what the laws saw."""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.statistics import collector

LAWS = Path(__file__).parent / "laws"
#: Examples that the laws of each file must see in a whole run: nine tenths of what they see today.
LEAST = {
    "test_adjoint.py": 4900, "test_draws.py": 32, "test_families.py": 52, "test_groups.py": 27, "test_in_place.py": 65,
    "test_layouts.py": 84, "test_optimizers.py": 90, "test_planted.py": 23, "test_programs.py": 272,
    "test_reshard.py": 6000, "test_rules.py": 1150, "test_scan.py": 54, "test_shared.py": 830, "test_writes.py": 94,
}  # fmt: skip

# Each example of a law that compiles takes seconds, so no deadline and no health check of speed.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", settings.get_profile("ci"), derandomize=False, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--deep` draws new examples in every run, and twenty times as many."""
    parser.addoption("--deep", action="store_true", help="draw new examples, and twenty times as many; slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    """Takes the profile that the flag names; threads of several test processes would fight over the cores."""
    settings.load_profile("deep" if config.getoption("--deep") else "ci")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `deep`, unless the flag is given."""
    if not config.getoption("--deep"):
        slow = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Notes the examples that hypothesis ran, as a law that enumerates does by `record_property("examples", n)`."""
    other = collector.value

    def note(statistics: Any) -> None:
        cases = [c for phase in statistics.values() if isinstance(phase, dict) for c in phase.get("test-cases", ())]
        item.user_properties.append(("examples", sum(c["status"] == "valid" for c in cases)))
        if other is not None:
            other(statistics)

    with collector.with_value(note):
        yield


def examples_of_laws(terminal: Any) -> Counter[str]:
    """Examples that passed, by the file of the law; a test that notes no number is one example."""
    seen: Counter[str] = Counter()
    for report in terminal.stats.get("passed", ()):
        path = Path(terminal.config.rootpath, report.nodeid.partition("::")[0])
        if report.when == "call" and path.parent == LAWS:
            noted = [n for name, n in report.user_properties if name == "examples"]
            seen[path.name] += sum(noted) if noted else 1
    return seen


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many examples each law held for."""
    seen = examples_of_laws(terminalreporter)
    if seen:
        each = ", ".join(f"{name.removeprefix('test_').removesuffix('.py')} {n}" for name, n in sorted(seen.items()))
        terminalreporter.write_line(f"laws held for {sum(seen.values())} examples: {each}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a whole run in which the laws of a file saw too few examples, or a file of laws has no floor."""
    terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or terminal.stats.get("failed") or terminal.stats.get("error"):
        return
    seen = examples_of_laws(terminal)
    if seen.keys() != {p.name for p in LAWS.glob("test_*.py")}:
        return
    few = [f"{name} {seen[name]} of {LEAST.get(name, 'a number to be set')}" for name in sorted({*seen, *LEAST})
           if name not in LEAST or seen[name] < LEAST[name]]  # fmt: skip
    if few:
        terminal.write_line(f"too few examples of laws: {', '.join(few)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
