"""One figure with four panels. matplotlib is optional (`pip install -e '.[plots]'`); without it nothing is drawn."""

from pathlib import Path
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

INK, GRID = "#333333", "#dddddd"
COLOURS = {"none": "#999999", "hash": "#e69f00", "radix": "#0072b2", "paper": "#e8e8e8"}  # palette of Okabe and Ito
MARKS = {"simulated": "o", "measured": "s"}


def draw(figures: dict[str, dict[str, Any]], folder: Path) -> Path | None:
    """Draw the panels of the given sections. Returns None without matplotlib or data."""
    panels = [(name, panel) for name, panel in PANELS.items() if name in figures]
    if Figure is None or not panels:
        return None
    height, width = -(-len(panels) // 2), min(2, len(panels))
    figure = Figure(figsize=(6.4 * width, 4.4 * height), layout="constrained", facecolor="white")
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes, (name, panel) in zip(grid, panels, strict=False):
        _style(axes)
        panel(axes, figures[name])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prefix.png"
    figure.savefig(path, dpi=150)
    return path


def _style(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)


def _sampling(axes: "Axes", data: dict[str, Any]) -> None:
    curve = data["saved_percent"]
    _paper(axes, curve, (6.1, 9.8))
    _line(axes, curve, "simulated", "radix", "real scheduler and tables")
    _labels(axes, "Samples of one prompt share its blocks (M10)", "samples per request", "memory saved (%)", curve)


def _beams(axes: "Axes", data: dict[str, Any]) -> None:
    scripted, embedded = data["simulated_percent"], data["measured_percent"]
    _paper(axes, scripted, (37.6, 55.2))
    _line(axes, embedded, "measured", "radix", "embedded model")
    _line(axes, scripted, "simulated", "hash", "scripted logprobs", below=True)
    _labels(axes, "Beams share until they write (M11)", "beam width", "memory saved (%)", scripted)


def _reuse(axes: "Axes", data: dict[str, Any]) -> None:
    for index, label in (("hash", "hash index: whole blocks"), ("radix", "radix tree: to the token")):
        axes.step(data["shared"], data[index], where="post", color=COLOURS[index], linewidth=2.2, label=label)
    axes.fill_between(data["shared"], data["hash"], data["radix"], step="post", color=COLOURS["radix"], alpha=0.12)
    for index, place in (("radix", (3, 33)), ("hash", (33, 9))):
        tokens = data[index][data["shared"].index(17)]
        arrow = {"arrowstyle": "-", "color": COLOURS[index]}
        axes.annotate(
            f"17 shared,\n{tokens} reused", (17, tokens), place, color=COLOURS[index], fontsize=9, arrowprops=arrow
        )
    axes.set_xticks(range(0, 65, 16))
    axes.set_yticks(range(0, 65, 16))
    axes.set(title="What is reused of a common beginning (R5)", xlabel="tokens in common", ylabel="tokens reused")
    axes.legend(frameon=False, loc="upper left")


def _gain(axes: "Axes", data: dict[str, Any]) -> None:
    thickness = 0.36
    for offset, index in ((-thickness / 2, "hash"), (thickness / 2, "radix")):
        gains = [one[index]["gain"] for one in data.values()]
        places = [i + offset for i in range(len(data))]
        bars = axes.bar(places, gains, thickness, color=COLOURS[index], label=f"{index} index")
        labels = [
            f"{gain:.1f}x\n{one[index]['hit_rate']:.0f} %" for gain, one in zip(gains, data.values(), strict=True)
        ]
        axes.bar_label(bars, labels, fontsize=8, color=INK, padding=2)
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    axes.set_xticks(range(len(data)), [name.replace(" ", "\n") for name in data])
    axes.margins(y=0.22)
    axes.set(title="Gain and hit rate by workload, embedded model (R1)", ylabel="times faster than without reuse")
    axes.legend(frameon=False, loc="upper right")


PANELS = {"sampling": _sampling, "beams": _beams, "granularity": _reuse, "gain": _gain}


def _paper(axes: "Axes", curve: dict[int, float], reported: tuple[float, float]) -> None:
    axes.axhspan(*reported, color=COLOURS["paper"], zorder=0)
    middle = sum(reported) / 2
    axes.text(min(curve), middle, "reported", color="#777777", fontsize=9, va="center")


def _line(axes: "Axes", curve: dict[int, float], kind: str, colour: str, label: str, *, below: bool = False) -> None:
    axes.plot(
        list(curve), list(curve.values()), MARKS[kind] + "-", color=COLOURS[colour], label=f"{label} ({kind})", lw=2.2
    )
    for width, percent in curve.items():
        axes.annotate(
            f"{percent:.1f}",
            (width, percent),
            (0, -15 if below else 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )


def _labels(axes: "Axes", title: str, x: str, y: str, curve: dict[int, float]) -> None:
    axes.set_xticks(list(curve))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.18)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.legend(frameon=False, loc="lower right")
