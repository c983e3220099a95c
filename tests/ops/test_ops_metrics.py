"""What the dashboard and the alerts ask for is what the services really serve to Prometheus."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from foveate.client import Client, Context
from foveate.service_process import ServiceProcess
from foveate.stack import Stack

DEPLOY = Path(__file__).parents[2] / "deploy"
# Counters of what seldom happens appear with the first thing that does.
ONLY_AFTER_TROUBLE = {
    "foveate_requests_refused_total",
    "foveate_media_decoder_failures_total",
    "foveate_redis_breaker_open",  # only with Redis
    "foveate_kv_cold_used_bytes",
    "foveate_registry_events_total",
}
_BUILTIN_LABELS = {"le", "instance", "job"}


def scraped(process: ServiceProcess) -> dict[str, set[str]]:
    """Returns the names a service serves, each with its labels."""
    port = re.search(r"metrics at port (\d+)", process.log_path.read_text())
    assert port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def served(stack: Stack, client: Client, context: Context) -> dict[str, set[str]]:
    client.ask(context, "Describe the video.")
    merged: dict[str, set[str]] = {}
    for process in stack.processes:
        for name, labels in scraped(process).items():
            merged.setdefault(name, set()).update(labels)
    return merged


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana/foveate.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Returns the metrics of an expression, each with the labels it is filtered by; fails on bad syntax."""
    text = expression.replace("$__rate_interval", "5m")
    promql_parser.parse(text)
    metrics = re.findall(
        r"\b((?:foveate|gen_ai)_\w+)(\{[^}]*\})?", re.sub(r"\b(?:by|ignoring|on) ?\([^)]*\)", "", text)
    )
    return [(name, set(re.findall(r"(\w+)(?:!?[=~]+)", matchers))) for name, matchers in metrics]


def grouped(expression: str) -> set[str]:
    """Returns the labels an expression sums by."""
    groups = re.findall(r"\b(?:by|on|ignoring) ?\(([^)]*)\)", expression)
    return {label.strip() for group in groups for label in group.split(",")} - _BUILTIN_LABELS


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_what_is_served(expression: str, served: dict[str, set[str]]) -> None:
    found = selectors(expression)
    assert found
    known = [(name, labels) for name, labels in found if name not in ONLY_AFTER_TROUBLE]
    for name, labels in known:
        assert name in served
        assert labels - _BUILTIN_LABELS <= served[name], name
    assert not known or grouped(expression) <= set[str]().union(*(served[name] for name, _ in known))


def test_every_metric_of_ours_is_on_the_dashboard(served: dict[str, set[str]]) -> None:
    asked = {name for expression in expressions() for name, _ in selectors(expression)}
    families = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) for name in served if re.match("foveate_|gen_ai_", name)
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {name for name in families - shown if not name.endswith("_created")} == set()


def test_every_alert_has_its_paragraph() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    manual = (DEPLOY.parent / "docs/operations.md").read_text()
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", manual, re.MULTILINE)}
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["annotations"]["runbook"].partition("#")[2] in anchors
