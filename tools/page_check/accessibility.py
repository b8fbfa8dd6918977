"""Findings of axe-core on what a page shows."""

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from benchmarks.commit import ROOT

FOLDER = ROOT / "build" / "page"
GRAVE = ("serious", "critical")


def axe_file(folder: Path = FOLDER) -> Path:
    """The script of axe-core that `make page-check` fetched."""
    return next(folder.glob("axe-core-*/axe.min.js"))


def findings(page: Page) -> list[dict[str, Any]]:
    """Rules of axe that the page breaks: `id`, `impact`, `help` and up to three of the `elements`."""
    page.evaluate(axe_file().read_text())
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        {
            "id": rule["id"],
            "impact": rule["impact"],
            "help": rule["help"],
            "elements": [f"{node['target']}: {node['failureSummary'][:300]}" for node in rule["nodes"][:3]],
        }
        for rule in result["violations"]
    ]


def grave(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings that are serious or critical."""
    return [one for one in found if one["impact"] in GRAVE]
