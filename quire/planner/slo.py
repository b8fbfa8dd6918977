"""Service level objectives: limits of latencies that a share of the requests has to keep."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import get_args

from quire.errors import ConfigError, nearest
from quire.planner.results import Metric, RequestResult, SimulationResult

METRIC_NAMES: Mapping[Metric, str] = MappingProxyType(
    {"ttft": "time to the first token", "tpot": "time per further token", "latency": "time of the whole request"}
)
_TERM = re.compile(r"\s*([a-z_]+)\s*(?:=|<=|:)\s*(\d+(?:\.\d+)?)\s*(ms|s|us|%|)\s*", re.IGNORECASE)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_EXAMPLE = "ttft=500ms,tpot=50ms"


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits in seconds, and the share of requests that must keep each of them."""

    limits: Mapping[Metric, float]
    share: float = 0.99

    def violations(self, result: SimulationResult) -> dict[Metric, float]:
        """The metrics that exceed their limit, with their value at the percentile; empty if the SLO is met."""
        values = {metric: result.percentile(metric, self.share) for metric in self.limits}
        return {metric: value for metric, value in values.items() if not value <= self.limits[metric]}

    def is_late(self, request: RequestResult, metric: Metric) -> bool:
        """Whether a request exceeds a limit. One that does not complete exceeds all."""
        return not (request.is_complete and getattr(request, metric) <= self.limits[metric])

    def __str__(self) -> str:
        parts = [f"{metric} {1e3 * limit:g} ms" for metric, limit in self.limits.items()]
        return f"{', '.join(parts)} for {100 * self.share:g} % of requests"


def parse_slo(text: str) -> SLO:
    """The SLO of 'ttft=500ms,tpot=50ms,latency=10s,share=95%'. Times need a unit. Raises ConfigError."""
    limits: dict[Metric, float] = {}
    share = 0.99
    for term in text.split(","):
        matched = _TERM.fullmatch(term)
        if matched is None:
            raise ConfigError(f"slo: {term.strip()!r:.40} is not understood; write it as {_EXAMPLE}")
        name, number, unit = matched[1].lower(), float(matched[2]), matched[3].lower()
        if name == "share":
            share = number / 100 if unit == "%" else number
            if not 0 < share < 1:
                raise ConfigError(f"slo: share must be between 0 and 100 %, not {term.strip()!r:.40}")
        elif name not in get_args(Metric):
            raise ConfigError(
                f"slo: there is no metric {name!r:.40}{nearest(name, METRIC_NAMES)}; known: ttft, tpot, latency"
            )
        elif unit not in _UNITS:
            raise ConfigError(f"slo: {name} needs a unit, as in {_EXAMPLE}")
        else:
            limits[name] = number * _UNITS[unit]  # type: ignore[index]  # it is a Metric
    if not limits or not all(isfinite(limit) and limit > 0 for limit in limits.values()):
        raise ConfigError(f"slo: give at least one limit above 0, as in {_EXAMPLE}")
    return SLO(limits, share)
