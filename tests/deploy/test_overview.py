"""What the page and the metrics say of a federation, read from folders with entries as a server writes."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.deploy import ledger as ledger_module  # noqa: E402
from holdfast.deploy.enrolment import Enrolment  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.metrics import MetricsServer, prometheus_text  # noqa: E402
from holdfast.deploy.overview import Overlook, time_left  # noqa: E402
from holdfast.deploy.processes import Processes, free_port  # noqa: E402
from holdfast.deploy.project import Project, init  # noqa: E402
from holdfast.deploy.traffic import TrafficCounter, read_traffic  # noqa: E402


class Clock(ledger_module.datetime.datetime):  # type: ignore[misc, name-defined]
    """Every entry is ten seconds after the one before."""

    seconds = 0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        cls.seconds += 10
        return cls.fromtimestamp(time.time() - 1000 + cls.seconds, tz)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Four clients after two of five rounds: one banned, one that did not answer, one that was refused."""
    project = init(tmp_path / "ward", 4, port=free_port())
    monkeypatch.setattr(ledger_module.datetime, "datetime", Clock)
    fill(project.ledger())
    monkeypatch.undo()
    who = Enrolment.of(project.ledger().entries).members
    counter = TrafficCounter(project.server / "traffic.json")
    for client in (0, 1):
        counter.request(who[client].fingerprint)
        counter.up(who[client].fingerprint, 1000)
        counter.down(who[client].fingerprint, 3000)
    counter.refused("quota")
    counter.unauthenticated()
    counter.save(now=True)
    line = {"at": "2026-11-19T00:00:00+00:00", "fingerprint": who[0].fingerprint, "kind": "quota", "round": 2}
    (project.server / "refusals.jsonl").write_text(
        json.dumps({**line, "what": "has sent\x1b[31m all", "strike": False}) + "\n{broken\n"
    )
    return project


def fill(ledger: Ledger) -> None:
    ledger.append("start", round=0, run="run-1")
    ledger.append("round", None, 1, run="run-1", took_part=[0, 1, 2, 3], accuracy=0.5, **{"bytes/up": 400})
    ledger.append("strike", 2, 2, reason="update has 1,204 bytes", run="run-1")
    ledger.append("strike", 2, 2, reason="update has 77 bytes", run="run-1")
    ledger.append("missing", None, 2, clients={"3": "no answer within 9 s"}, task="train", step=0)
    ledger.append("ban", 2, 2, reason='2 strikes, the last: "odd"\\\n', by="strikes")
    ledger.append("stranger", node="7", reason="its key is not enrolled")
    accuracy = {"accuracy": 0.75, "bytes/up": 200, "bytes/down": 300}
    ledger.append("round", None, 2, run="run-1", took_part=[0, 1], **accuracy)


def samples(text: str) -> dict[str, float]:
    """Parse Prometheus' text format: every sample has a type and a help line before it."""
    out: dict[str, float] = {}
    known: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            known.add(line.split()[2])
            continue
        found = re.fullmatch(r'([a-z_]+)(\{([a-z]+="(?:[^"\\]|\\["\\n])*",?)+\})? (\S+)', line)
        assert found is not None and found[1] in known, line
        out[found[1] + (found[2] or "")] = float(found[4])
    return out


def test_what_happened_is_counted(project: Project) -> None:
    seen = Overlook(project).look()
    assert (seen.state, seen.round, seen.planned, seen.accuracy) == ("stopped", 2, 5, 0.75)
    first, second = seen.rounds
    assert first.seconds == pytest.approx(10, abs=1) and second.seconds == pytest.approx(60, abs=1)
    assert second.refused.keys() == {2} and second.missing == {3: "no answer within 9 s"}
    assert seen.bytes == (600, 300) and seen.reasons == {"update has N bytes": 2}
    states = {node.client: (node.state, node.rounds, node.strikes) for node in seen.nodes}
    assert states == {0: ("active", 2, 0), 1: ("active", 2, 0), 2: ("banned", 1, 2), 3: ("active", 1, 0)}
    assert seen.nodes[2].why.startswith("2 strikes") and seen.nodes[3].why == "no answer within 9 s"
    said = [(one.who, one.reason, one.strike) for one in seen.refusals]
    assert said[0] == ("client 0", "has sent all", False)
    assert said[-1] == ("a node that is not enrolled", "its key is not enrolled", False)
    assert seen.left is None and not any(node.present for node in seen.nodes)


def test_presence_and_time_left_while_it_is_up(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "alive", lambda self: [1])
    seen = Overlook(project).look()
    assert seen.state == "up" and [node.present for node in seen.nodes] == [True, True, False, False]
    assert time_left(seen.rounds, 5, time.time()) == seen.left == pytest.approx(2 * 60, abs=5)
    assert time_left([], 5, 0.0) is None and time_left(seen.rounds, None, 0.0) is None


def test_the_metrics_can_be_parsed(project: Project) -> None:
    found = samples(prometheus_text(Overlook(project).look()))
    wanted = {
        "holdfast_up": 0,
        "holdfast_ledger_good": 1,
        "holdfast_round": 2,
        "holdfast_rounds_planned": 5,
        "holdfast_accuracy": 0.75,
        'holdfast_nodes{state="known"}': 4,
        'holdfast_nodes{state="banned"}': 1,
        'holdfast_refused_replies_total{reason="update has N bytes"}': 2,
        'holdfast_refused_requests_total{kind="quota"}': 1,
        "holdfast_unauthenticated_requests_total": 1,
        'holdfast_bytes_total{direction="up"}': 600,
        'holdfast_proxy_bytes_total{direction="down"}': 6000,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found['holdfast_round_seconds{part="all"}'] == pytest.approx(60, abs=1)
    assert abs(found["holdfast_last_commit_timestamp_seconds"] - time.time()) < 3600


def test_labels_are_escaped(project: Project) -> None:
    ledger = project.ledger()
    ledger.append("strike", 1, 2, reason='a "quoted" \\ word')
    assert 'reason="a \\"quoted\\" \\\\ word"' in prometheus_text(Overlook(project).look())


def test_the_metrics_are_served_on_this_machine_only(project: Project) -> None:
    metrics = MetricsServer(project, port := free_port())
    try:
        assert metrics.url == f"http://127.0.0.1:{port}/metrics"
        answers = {}
        for path, host in (("/metrics", None), ("/", None), ("/metrics", "elsewhere.example:80")):
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            link.request("GET", path, headers={} if host is None else {"Host": host})
            answer = link.getresponse()
            answers[path, host] = answer.status, answer.read().decode()
            link.close()
        assert [status for status, _ in answers.values()] == [200, 404, 403]
        assert samples(answers["/metrics", None][1])["holdfast_round"] == 2
        with pytest.raises(ConfigError, match=f"metrics: port {port}"):
            MetricsServer(project, port)
    finally:
        metrics.close()


def test_a_damaged_ledger_is_reported_and_what_was_read_is_shown(project: Project) -> None:
    overlook = Overlook(project)
    overlook.look()
    project.ledger_file.write_bytes(b"")
    seen = overlook.look()
    assert "lines were removed" in seen.problem and seen.round == 2
    assert "holdfast_ledger_good 0" in prometheus_text(seen)


def test_before_the_first_run(tmp_path: Path) -> None:
    seen = Overlook(init(tmp_path / "ward", 2, port=free_port())).look()
    assert (seen.state, seen.round, seen.planned, seen.accuracy) == ("waiting", 0, 5, None)
    assert samples(prometheus_text(seen))["holdfast_round"] == 0


def test_a_node_that_comes_is_written_down_at_once(tmp_path: Path) -> None:
    counter = TrafficCounter(tmp_path / "traffic.json")
    for name in ("first", "second"):
        counter.request(name)
        assert name in read_traffic(tmp_path / "traffic.json").nodes
    (tmp_path / "traffic.json").unlink()
    counter.request("first")
    counter.save()
    assert not (tmp_path / "traffic.json").exists()  # nothing new: it waits for the next turn


def test_counts_survive_a_new_proxy_and_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    for _ in range(2):
        counter = TrafficCounter(file)
        counter.up("k", 5)
        counter.refused("form")
        counter.save(now=True)
    assert read_traffic(file).nodes["k"].up == 10 and read_traffic(file).refused["form"] == 2
    for harm in (b"", b"[]", b'{"nodes": 3, "refused": [], "unauthenticated": "x"}', b'{"nodes": {"k": {}}}'):
        file.write_bytes(harm)
        assert read_traffic(file).nodes == {} and read_traffic(file).unauthenticated == 0
