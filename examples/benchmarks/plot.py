"""The plot of the benchmark: the ratios of all rows as bars, below one where fx_feather takes less."""

from pathlib import Path
from typing import Any

SHOWN = {"cpu": "CPU time", "step": "step time", "memory": "peak memory"}


def plot(results: list[dict[str, Any]], path: Path) -> str:
    """Draws the ratios, and says what it did; matplotlib need not be there."""
    try:
        import matplotlib
    except ImportError:
        return "no plot, since matplotlib is not installed (pip install matplotlib)"
    if not results:
        return "no plot of no rows"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.2 * len(results) + 2, 4), layout="constrained")
    for k, (key, name) in enumerate(SHOWN.items()):
        axes.bar(
            [i + 0.25 * (k - 1) for i in range(len(results))], [r["ratios"][key] for r in results], 0.25, label=name
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(results)), [f"{r['row']}\n{r['ranks']} ranks" for r in results])
    axes.set_ylabel("fx_feather / peer")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"wrote {path}"
