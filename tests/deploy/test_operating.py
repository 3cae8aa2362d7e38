"""A federation of real processes as its operator sees it: metrics, a ban, and the way back from it."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.reading import read_json  # noqa: E402
from holdfast.deploy.overview import Overlook  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.real_federation import PATIENT, found, run_federation  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_client_that_is_no_longer_banned_comes_back_with_its_key(tmp_path: Path) -> None:
    """Meanwhile the metrics say what happens. Rounds may begin before the server has read of the ban, or of
    its end."""
    project = found(tmp_path, clients=2, rounds=16, quorum=1.0, wait=PATIENT, metrics=free_port())
    for file in (project.experiment, *project.path.glob("nodes/*/experiment.toml")):
        file.write_text(file.read_text().replace("[engine]", "[evaluate]\nevery = 16\n[engine]"))
    scraped: dict[str, str] = {}

    def operate(up: RunningFederation, line: str) -> None:
        found = re.match(r"round (\d+): (\d) took part", line)
        if found is None:
            return
        what = "ban" if found[1] == "1" else "unban" if found[2] == "1" else ""
        if what and what not in scraped:
            assert up.metrics is not None
            with urllib.request.urlopen(up.metrics.url, timeout=60) as answer:
                scraped[what] = answer.read().decode()
            project.ledger().append(what, 1, reason="a trial", by="operator")

    before: dict[str, object] = {}

    def first(up: RunningFederation, line: str) -> None:
        before.update(read_json(project.server / "registered.json") or {} if not before else {})
        operate(up, line)

    run_federation(project, disturb=first)
    ledger = project.ledger()
    took_part = [entry.what["took_part"] for entry in ledger.of("round")]
    assert took_part[0] == took_part[-1] == [0, 1] and [0] in took_part
    assert ledger.of("rotate") == [] and len(ledger.of("enrol")) == 2
    assert read_json(project.server / "registered.json") == before
    assert read_json(project.server / "suspended.json") == {}
    round = re.search(r"^holdfast_round (\d+)$", scraped["ban"], re.MULTILINE)
    assert round is not None and 1 <= int(round[1]) < 16  # the next round may have ended when it was asked
    assert 'holdfast_nodes{state="present"} 2\n' in scraped["ban"]
    assert 'holdfast_nodes{state="banned"} 1\n' in scraped["unban"] and "holdfast_up 1\n" in scraped["unban"]
    seen = Overlook(project).look()
    assert seen.state == "finished" and seen.left is None and seen.count("active") == 2
    assert all(node.up > 10_000 and node.down > 10_000 and not node.present for node in seen.nodes)
