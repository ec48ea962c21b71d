"""The files of deploy/: they name what a served model has, and agree with the server's own limits."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.settings import EngineSettings
from headrace.cli.flags import ENGINE_FLAGS
from headrace.cli.serve import SERVE_FLAGS
from headrace.engine.client import EngineClient
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.net.front import OPEN
from headrace.serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/headrace.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
Samples = Mapping[str, list[Mapping[str, str]]]  # labels of each series, by the sample's name

_STRING = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_WORDS = {"and", "or", "unless", "bool"}
_ADDED = {"job", "instance"}  # labels that Prometheus adds


def of(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, matchers) of each selector of a PromQL expression. Functions are followed by a parenthesis."""
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    for found in _SELECTOR.finditer(bare):
        before, after = bare[: found.start()], bare[found.end() :].lstrip()
        inside = before.count("{") > before.count("}") or _STRING.sub("", before).count('"') % 2
        number = before[-1:].isdigit() or before[-1:] == "."
        if not (inside or number or found[1] in _WORDS or after.startswith("(")):
            yield found[1], [m.groups() for m in _MATCHER.finditer(found[2] or "")]  # type: ignore[misc]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything in deploy/."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for test in of("alerts_test.yml")["tests"]:
        for series in test["input_series"]:
            yield test["name"], series["series"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in of("alerts.yml")["groups"] for rule in group["rules"]]


@pytest.fixture
async def page(tiny: Path) -> AsyncIterator[Samples]:
    """All that a served model shows, after a request."""
    engine = await EngineClient.start(EngineSettings(model=str(tiny), max_model_len=128, measure_roof=True))
    app = App(engine, AppSettings(names=("tiny",), price_per_hour=1.0, goodput=("ttft:1000",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        answer = await client.post("/v1/completions", json={"prompt": "the answer", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        text = (await client.get("/metrics")).text
    await engine.close()
    samples: dict[str, list[Mapping[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    yield samples


def test_expressions_are_read() -> None:
    read = list(selectors('1e6 * sum by (le) (rate(a:b_total{x="1", y=~"$z"}[$__rate])) / on(x) c unless up == 0.02'))
    assert read == [("a:b_total", [("x", "=", "1"), ("y", "=~", "$z")]), ("c", []), ("up", [])]
    assert len(list(expressions())) > 100


async def test_every_metric_is_on_the_page(page: Samples) -> None:
    for where, expression in expressions():
        found = list(selectors(expression))
        assert found, (where, expression)
        for name, matchers in found:
            if name == "up":
                continue
            assert name in page, (where, name)
            for label, kind, value in matchers:
                if label in _ADDED:
                    continue
                assert all(label in labels for labels in page[name]), (where, name, label)
                if kind == "=" and label not in ("model_name", "status"):
                    assert any(labels[label] == value for labels in page[name]), (where, name, label, value)


def test_the_dashboard_is_whole() -> None:
    ids = Counter(panel["id"] for panel in PANELS)
    assert set(ids.values()) == {1}
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        for part in (panel, *panel.get("targets", ())):
            assert part.get("datasource", {}).get("uid", "${datasource}") == "${datasource}"
        for target in panel.get("targets", ()):
            assert target["expr"].count("$instance") == len(list(selectors(target["expr"]))), "one server can be picked"
    assert [v["name"] for v in BOARD["templating"]["list"]] == ["datasource", "model", "instance"]


def test_every_alert_is_tested() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    checks = [check for test in of("alerts_test.yml")["tests"] for check in test["alert_rule_test"]]
    firing = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert firing == silent == set(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert sorted(rule["annotations"]) == ["description", "summary"]


def test_what_is_mounted_exists() -> None:
    services = of("compose.yaml")["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in of("compose.yaml")["volumes"]
    for file in of("prometheus.yml")["rule_files"]:
        assert any(volume.startswith(f"./{file}:/etc/prometheus/") for volume in services["prometheus"]["volumes"])
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    provider = of("grafana/provisioning/dashboards/headrace.yaml")["providers"][0]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounts["./grafana/dashboards"] + "/headrace.json"
    assert of("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["url"] == "http://prometheus:9090"


def kubernetes() -> dict[str, Any]:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def dockerfile(instruction: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(instruction + " ")]


def service_unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "headrace.service")
    return parser["Service"]


def test_flags_exist() -> None:
    commands = [
        json.loads(dockerfile("CMD")[0]),
        of("compose.yaml")["services"]["headrace"]["command"],
        kubernetes()["containers"][0]["args"],
    ]
    for command in commands:
        flags = [word.partition("=")[0] for word in command if word.startswith("--")]
        assert flags and {flag[2:].replace("-", "_") for flag in flags} <= ENGINE_FLAGS.keys() | SERVE_FLAGS.keys()
    assert service_unit()["ExecStart"].split()[1:] == ["serve", "--config", "/etc/headrace/config.yaml"]


def test_all_wait_for_requests_to_drain() -> None:
    drain = ServeSettings().shutdown_timeout
    assert int(service_unit()["TimeoutStopSec"]) > drain + 10 and service_unit()["KillMode"] == "mixed"
    grace = of("compose.yaml")["services"]["headrace"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > drain + 10
    assert kubernetes()["terminationGracePeriodSeconds"] > drain + 10


def test_probes_need_no_key() -> None:
    container = kubernetes()["containers"][0]
    paths = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")]
    paths += re.findall(r"127\.0\.0\.1:8000(/\w+)", (DEPLOY / "Dockerfile").read_text())
    assert paths == ["/live", "/live", "/ready", "/health"] and set(paths) <= OPEN


def test_nothing_runs_as_root() -> None:
    user = dockerfile("USER")[0]
    assert int(user.partition(":")[0]) > 0
    pod = kubernetes()
    assert pod["securityContext"]["runAsNonRoot"] and str(pod["securityContext"]["fsGroup"]) == user.partition(":")[2]
    assert service_unit()["DynamicUser"] == "yes" and service_unit()["NoNewPrivileges"] == "yes"


def test_the_image_has_what_it_copies() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in dockerfile("COPY"):
        if not line.startswith("--from"):
            *sources, _ = line.split()
            assert all((ROOT / source).exists() for source in sources) and set(sources) <= let_in
    images = [line.split()[0] for line in dockerfile("FROM")]
    images += [service["image"] for name, service in of("compose.yaml")["services"].items() if name != "headrace"]
    assert all(re.search(r":v?\d+\.\d+", image) for image in images), "each of a given version"


def ran(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    told = done.stdout + done.stderr
    assert done.returncode == 0 or ("is not executable" in told and told.count("\n") == 1), told


def test_prometheus_takes_the_rules() -> None:
    ran("promtool", "check", "config", "prometheus.yml")
    ran("promtool", "test", "rules", "alerts_test.yml")


def test_systemd_takes_the_unit() -> None:
    ran("systemd-analyze", "verify", "./headrace.service")
    ran("systemd-analyze", "security", "--offline=true", "--threshold=20", "./headrace.service")
