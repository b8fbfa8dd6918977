"""Hit-rate curves by pool size, one panel per trace. matplotlib is optional (`pip install -e '.[plots]'`)."""

from pathlib import Path

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

INK, GRID = "#333333", "#dddddd"
COLOURS = {
    "lru": "#999999",
    "lfu": "#e69f00",
    "priority": "#cc79a7",
    "cost": "#0072b2",
    "gdsf-hits": "#009e73",
    "gdsf-siblings": "#d55e00",
    "optimum": "#333333",
}


def draw(curves: dict[str, dict[str, dict[str, float]]], folder: Path) -> Path | None:
    """Draw `curves`: trace -> policy -> pool share -> hit rate (%). Returns None without matplotlib."""
    if Figure is None or not curves:
        return None
    width = min(4, len(curves))
    height = -(-len(curves) // width)
    figure = Figure(figsize=(4.2 * width, 3.4 * height), layout="constrained", facecolor="white")
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes, (name, orders) in zip(grid, curves.items(), strict=False):
        for order, curve in orders.items():
            style = ":" if order == "optimum" else "-"
            sizes = [100 * float(size) for size in curve]
            axes.plot(sizes, list(curve.values()), style, marker="o", ms=3, color=COLOURS[order], label=order, lw=1.8)
        _dress(axes, name)
    for axes in grid[len(curves) :]:
        axes.set_visible(False)
    grid[0].legend(frameon=False, fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "eviction.png"
    figure.savefig(path, dpi=150)
    return path


def _dress(axes: "Axes", name: str) -> None:
    axes.set(title=name, xlabel="pool, % of the footprint", ylabel="hit rate (%)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
