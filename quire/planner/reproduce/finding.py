"""Finding: one figure of a row, as reported and as found here. Context: what all rows share while they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import msgspec

Kind = Literal["measured", "simulated", "computed", "arithmetic", "pending"]
_ROUNDING = 1e-9  # of a mean: smaller differences are those of sums in another order
# two-sided 95 % quantiles of Student's t distribution, by degrees of freedom
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure.

    kind: measured (kernels, a machine), simulated (real scheduler and KV cache), computed (by the memory plan and the
    KV cache), arithmetic (of the source's numbers: it says nothing about quire), or pending.
    """

    what: str
    ours: float | None  # None: pending
    unit: str
    kind: Kind
    reported: tuple[float, float | None] | None = None  # lowest, highest (None: a direction); None: no number for it
    spread: float | None = None  # half of the 95 % confidence interval over seeds
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the nearest reported value; 1 within the reported range; None if that value is 0."""
        if self.ours is None or self.reported is None:
            return None
        low, high = self.reported
        if low <= self.ours and (high is None or self.ours <= high):
            return 1.0
        nearest = low if high is None or self.ours < low else high
        return self.ours / nearest + 0.0 if nearest else None  # not -0.0


Reported = float | tuple[float, float | None] | None  # a value, or the lowest and the highest one


def simulated(
    what: str, ours: float, unit: str, reported: Reported = None, spread: float | None = None, note: str = ""
) -> Finding:
    """A figure of the scheduler and a KV cache in virtual time."""
    about = {"reported": _bounds(reported), "spread": spread, "note": note}
    return Finding(what=what, ours=float(ours), unit=unit, kind="simulated", **about)  # type: ignore[arg-type]


def computed(what: str, ours: float, unit: str, reported: Reported = None, note: str = "") -> Finding:
    """A figure that the code of the memory plan or of the KV cache gives for sizes."""
    return Finding(what=what, ours=float(ours), unit=unit, kind="computed", reported=_bounds(reported), note=note)


def arithmetic(what: str, ours: float, unit: str, reported: Reported = None, note: str = "") -> Finding:
    """A figure that follows from the source's own numbers."""
    return Finding(what=what, ours=float(ours), unit=unit, kind="arithmetic", reported=_bounds(reported), note=note)


def measured(what: str, ours: float, unit: str, reported: Reported = None, note: str = "") -> Finding:
    """A figure of a result file."""
    return Finding(what=what, ours=float(ours), unit=unit, kind="measured", reported=_bounds(reported), note=note)


def pending(what: str, why: str, reported: Reported = None, unit: str = "") -> Finding:
    """A figure that cannot be had yet."""
    return Finding(what=what, ours=None, unit=unit, kind="pending", reported=_bounds(reported), note=why)


def _bounds(reported: Reported) -> tuple[float, float | None] | None:
    return (float(reported), float(reported)) if isinstance(reported, int | float) else reported


def over_seeds(figure: Callable[[int], float], seeds: Sequence[int]) -> tuple[float, float | None]:
    """The mean of a figure over seeds, and half of its 95 % confidence interval; None for one seed."""
    values = [figure(seed) for seed in seeds]
    if len(values) < 2:
        return values[0], None
    middle, half = mean(values), _T95[min(len(values) - 2, len(_T95) - 1)] * stdev(values) / sqrt(len(values))
    return middle, half if half > _ROUNDING * abs(middle) else 0.0


@dataclass(slots=True)
class Context:
    """What rows share. Charts are SVG texts by file name."""

    quick: bool = False  # sizes whose figures have no meaning, for tests
    one_seed: bool = False  # of figures that show a tendency
    results: Path | None = None  # folder with the result files of benchmarks; None: there is none
    charts: dict[str, str] = field(default_factory=dict)
    simulations: dict[object, Any] = field(default_factory=dict)  # results that several rows need

    @property
    def seeds(self) -> range:
        """Seeds of simulations."""
        return range(1 if self.quick or self.one_seed else 3)

    def size(self, full: int, quick: int) -> int:
        """A number of requests."""
        return quick if self.quick else full

    def recorded(self, name: str) -> Mapping[str, Any] | None:
        """The figures that a benchmark wrote; None without its file."""
        file = None if self.results is None else self.results / f"{name}.json"
        if file is None or not file.is_file():
            return None
        found: Mapping[str, Any] = msgspec.json.decode(file.read_bytes())
        return found


Findings = list[Finding]
Row = Callable[[Context], Findings]
