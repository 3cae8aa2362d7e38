"""The live page of a federation, from its folder and over real sockets on the loopback address."""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.cli.federation_watch import _public_address  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, init  # noqa: E402
from holdfast.report import watch  # noqa: E402
from holdfast.report.page_server import PageServer, PublicAddress  # noqa: E402
from holdfast.report.watch import WatchPages  # noqa: E402
from tests.report.balanced_html import Balanced  # noqa: E402


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(watch, "_FRESH", 0.0)
    return init(tmp_path / "ward", 3, port=free_port())


def play(project: Project) -> None:
    ledger = project.ledger()
    ledger.append("start", round=0, run="run-1")
    ledger.append("strike", 2, 1, reason="<script>alert(1)</script> is not finite\x1b[31m", run="run-1")
    ledger.append("ban", 2, 1, reason="<b>bold</b>", by="strikes")
    ledger.append("round", None, 1, run="run-1", took_part=[0, 1], accuracy=0.5)
    ledger.append("stranger", node="7", reason="its key is not enrolled")


def test_the_page_follows_the_federation_and_text_of_nodes_stays_text(project: Project) -> None:
    pages = WatchPages(project)
    before = pages.state()
    assert "The run has not begun" in pages.page() and before.words == "waiting for the run to begin"
    play(project)
    page = pages.page()
    assert pages.state().version != before.version
    assert "Stopped after round 1 of 5, accuracy 50.0 %; 2 clients took part in the last round." in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; is not finite" in page and "<b>bold" not in page
    assert "\x1b" not in page and "a node that is not enrolled" in page and project.ledger().head in page
    for row in ('<th scope="row">client 0</th>', '<b class="bad">banned</b>', "&lt;b&gt;bold&lt;/b&gt;"):
        assert row in page
    links = Balanced(page).links  # nothing is loaded from anywhere
    assert all(link.startswith(("data:", "#")) for link in links)
    (project.run).mkdir()
    (project.run / "result.json").write_text("{}")
    assert pages.state().finished and "Finished after round 1" in pages.page()


def test_the_page_is_drawn_again_only_with_news(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, plain = [], watch.watch_page
    monkeypatch.setattr(watch, "watch_page", lambda *given: drawn.append(1) or plain(*given))
    pages = WatchPages(project)
    assert len({pages.page() for _ in range(3)}) == 1 and len(drawn) == 1
    play(project)
    pages.page()
    assert len(drawn) == 2


@contextmanager
def served(project: Project, public: PublicAddress | None = None) -> Iterator[PageServer]:
    with PageServer(WatchPages(project), 0, public=public) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_on_this_machine_it_answers_to_its_own_name_only(project: Project) -> None:
    with served(project) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path, host, status in (
            ("/", None, 200),
            ("/state", None, 200),
            ("/server/orders.key", None, 404),
            ("/", "x.example", 403),
        ):
            link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            link.request("GET", path, headers={} if host is None else {"Host": host})
            assert link.getresponse().status == status
            link.close()


def test_elsewhere_it_needs_tls_and_the_password(project: Project) -> None:
    public = _public_address(project, "127.0.0.1")  # as for another address, which a test may not open
    assert (project.server / "watch.secret").stat().st_mode & 0o077 == 0
    assert _public_address(project, "127.0.0.1").password == public.password
    trusted = ssl.create_default_context(cafile=project.server / "ca.pem")
    with served(project, public) as server:
        for password, status in ((None, 401), ("wrong", 401), (public.password, 200)):
            link = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=trusted)
            token = base64.b64encode(f"watch:{password}".encode()).decode()
            link.request("GET", "/", headers={} if password is None else {"Authorization": f"Basic {token}"})
            assert link.getresponse().status == status
            link.close()
        plain = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        plain.request("GET", "/")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        plain.close()
