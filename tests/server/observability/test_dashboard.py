"""The Grafana dashboard queries metrics and labels that a server has."""

import json
import re
from pathlib import Path

from multi_tenant_server import run_site
from server_probes import Page

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana-dashboard.json"


def test_every_query_names_metrics_and_labels_of_a_server():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    with run_site("root") as site:
        families = Page(site.ask("root", "GET", "/metrics").text).families
    labels_of = {
        name: {label for sample in family.samples for label in sample.labels} for name, family in families.items()
    }
    assert len(queries) > 20
    for query in queries:
        for name, selector in re.findall(r"(quire:\w+)\{(.*?)\}", query):
            family = name if name in labels_of else re.sub(r"_(total|bucket)$", "", name)
            assert family in labels_of, query
            grouped = [label for by in re.findall(r"by \((.*?)\)", query) for label in by.split(", ")]
            assert {*re.findall(r"(\w+)=", selector), *grouped} <= labels_of[family] | {"le"}, query


def test_panels_have_places_of_their_own():
    dashboard = json.loads(DASHBOARD.read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
