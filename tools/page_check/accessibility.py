"""Findings of axe-core on what a page shows."""

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from benchmarks.commit import ROOT

AXE = ROOT / "build" / "page" / "package" / "axe.min.js"
GRAVE = ("serious", "critical")


def findings(page: Page, axe: Path = AXE) -> list[dict[str, Any]]:
    """Rules of axe that the page breaks: `id`, `impact`, `help` and up to three of the `elements`."""
    page.evaluate(axe.read_text())
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
