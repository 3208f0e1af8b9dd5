"""docs/prometheus: every expression parses as PromQL and uses metrics and labels that a run exports."""

import json
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from lightning_llm.tracking.prometheus import FAMILIES, IDENTITY, PREFIX, RunMetrics

FOLDER = Path(__file__).parents[2] / "docs" / "prometheus"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
TARGET_LABELS = {"instance", "job"}
"""Prometheus adds them to everything it scrapes."""


def exported() -> dict[str, set[str]]:
    """Return the labels of every sample that a run with every number has, by the sample's name."""
    metrics = RunMetrics(dict.fromkeys(IDENTITY, "x"), {"recipe": "x"}, 1, {})
    keys = [each.key + ("x" if each.key.endswith("/") else "") for each in FAMILIES.values() if each.key]
    metrics.take({**dict.fromkeys(keys, 1.0), "step": 1, "own": 1.0, "event": "spike"})
    metrics.set(checkpoint_step=1, checkpoint_timestamp_seconds=1, disk_free_bytes=1, disk_size_bytes=1)
    metrics.end("finished")
    return {sample.name: {*sample.labels} for family in metrics.collect() for sample in family.samples}


EXPORTED = exported()


def selectors_of(expression: str) -> list[Any]:
    """Return the selectors of `expression`; of a range of time, the selector of its series."""
    found = {}

    def look(node: Any) -> None:
        each = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(each, promql_parser.VectorSelector):
            found[str(each)] = each

    promql_parser.walk(promql_parser.parse(expression), look)
    return list(found.values())


def problems(expression: str) -> list[str]:
    selectors = selectors_of(expression)
    assert selectors, expression
    found = []
    for each in selectors:
        labels = {matcher.name for matcher in each.matchers.matchers}
        if not labels <= EXPORTED.get(each.name, set()) | TARGET_LABELS:
            found.append(f"{each.name}{labels}")
        found += [] if each.name in EXPORTED else [each.name]
    return found


def test_all_metrics_can_be_exported():
    assert {name.removeprefix(PREFIX) for name in EXPORTED} == FAMILIES.keys()


def test_the_look_at_an_expression_finds_what_is_not_there():
    assert problems("rate(lightning_llm_lost[5m]) > 0") == ["lightning_llm_lost"]
    assert problems('sum(lightning_llm_loss{kind="x"})') == ["lightning_llm_loss{'kind'}"]
    with pytest.raises(ValueError, match=r"invalid|unexpected|unclosed"):
        problems("lightning_llm_loss >")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts(rule):
    assert problems(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].startswith("{{ $labels.run }}: ")
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}


def test_alerts_cover_what_a_run_can_meet():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    asked = " ".join(rule["expr"] for rule in RULES)
    for name in ("events_total", "last_record_timestamp_seconds", "forgetting", "disk_free_bytes", "running"):
        assert f"{PREFIX}{name}" in asked


def test_the_dashboard():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(x, y) for each in panels for x, y in _cells(each["gridPos"])]
    assert len(set(cells)) == len(cells)  # no overlap
    assert max(x for x, _ in cells) == 23
    for panel in panels:
        assert panel["title"]
        assert panel["type"] in ("timeseries", "table")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert problems(target["expr"]) == [], panel["title"]
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", *IDENTITY}
    for name in IDENTITY:
        query, _, label = variables[name]["query"]["query"].removeprefix("label_values(").rstrip(")").rpartition(", ")
        assert problems(query) == []
        assert label == name


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    return [
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]
