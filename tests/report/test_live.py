"""The live page, asked over real sockets on the loopback address."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from holdfast.cli import main
from holdfast.core.errors import ConfigError
from holdfast.report import live
from holdfast.report.live import Lookout, Server
from holdfast.storage.status import write_failure
from holdfast.storage.store import Store
from holdfast.sweeps.session import resume
from tests.report.conftest import sweep


@pytest.fixture(autouse=True)
def every_look_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_FRESH", 0.0)
    monkeypatch.setattr(live, "_REST", 0)


@contextmanager
def served(folder: Path, noted: Callable[[str], None] = lambda words: None) -> Iterator[Server]:
    with Server(folder, 0, noted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        link.request(method, path, headers={} if host is None else {"Host": host})
        answer = link.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        link.close()


def state(server: Server) -> dict[str, Any]:
    status, text, _ = ask(server, "/state")
    assert status == 200
    return json.loads(text)


@contextmanager
def killed_after(last: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is played inside is stopped when a round is committed."""
    plain = Store.commit

    def stop(self: Store, round: int) -> None:
        plain(self, round)
        if round == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "commit", stop)
        yield


def test_from_waiting_to_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = tmp_path / "job", threading.Event()
    folder.mkdir()
    with served(folder, lambda words: told.set()) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert (
            state(server)["words"] == "waiting for a run to begin"
            and "Waiting for a run to begin" in ask(server)[1]
        )
        with killed_after(0, monkeypatch):
            sweep(folder)
        assert (
            state(server)["words"] == "waiting for the first round"
            and "Waiting for the first round" in ask(server)[1]
        )
        with killed_after(2, monkeypatch):
            resume(folder)
        now = state(server)
        assert (now["words"], now["finished"]) == ("2 of 3 rounds", False) and now["age"] >= 0
        first = ask(server)[1]
        assert "1 of the runs has not finished" in first and f'"version":"{now["version"]}"' in first
        resume(folder)
        then = state(server)
        assert then["version"] != now["version"] and (then["words"], then["finished"], then["age"]) == (
            "finished",
            True,
            None,
        )
        assert "not finished" not in ask(server)[1]
        assert told.wait(120)


def test_a_page_is_rendered_again_only_when_something_changed(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, plain = [], live.render
    monkeypatch.setattr(live, "render", lambda records, **given: count.append(1) or plain(records, **given))
    with served(single) as server:
        pages = {ask(server)[1] for _ in range(3)}
    assert len(pages) == 1 and len(count) == 1


def test_a_page_that_cannot_be_drawn_goes_on_asking(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(records: object, **given: object) -> str:
        raise FileNotFoundError("parts/<b>")

    monkeypatch.setattr(live, "render", broken)
    with served(single) as server:
        status, text, _ = ask(server)
    assert (
        status == 200
        and "The page cannot be drawn now: FileNotFoundError: parts/&lt;b&gt;" in text
        and 'fetch("/state"' in text
    )


def test_the_page_may_ask_its_own_server_only(single: Path) -> None:
    with served(single) as server:
        _, text, headers = ask(server)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    for rules in (policy, headers["Content-Security-Policy"]):
        assert rules.startswith("default-src 'none'") and re.findall(r"connect-src ([^;]*)", rules) == [
            "'self'"
        ]
    assert (
        "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        and headers["Cache-Control"] == "no-store"
    )
    assert (
        text.count('fetch("/state" + HERE') == 1
        and not re.search(r"https?:|@import", text)
        and text.rstrip().endswith("</html>")
    )


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "127.0.0.1:{port}.evil.example", ""],
)
def test_other_names_are_refused(single: Path, host: str) -> None:
    """A name that somebody else resolves to this machine (DNS rebinding) gets nothing."""
    with served(single) as server:
        for path in ("/", "/state"):
            status, text, _ = ask(server, path, host=host.format(port=server.port))
            assert status == 403 and "fedavg" not in text and "version" not in text


def test_two_paths_and_one_method(single: Path) -> None:
    with served(single) as server:
        assert ask(server, host=f"localhost:{server.port}")[0] == 200
        assert [
            ask(server, path)[0] for path in ("/manifest.json", "/../", "/?x", "/state/", "/%2e%2e/")
        ] == [404] * 5
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            status, text, headers = ask(server, method=method)
            assert status == 405 and headers["Allow"] == "GET" and "fedavg" not in text


def test_of_many_runs_each_has_a_page(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_TOGETHER", 3)
    with served(grid) as server:
        links = re.findall(r'href="(/runs/[^"]*)"', ask(server)[1])
        runs = sorted(file.parent.name for file in grid.glob("*/manifest.json"))
        assert [unquote(link) for link in links] == [f"/runs/{name}.html" for name in runs] and len(
            links
        ) == 6
        status, text, _ = ask(server, links[2])
        assert (
            status == 200
            and "previous run" in text
            and 'href="/">all 6 runs' in text
            and text.count("<h1>") == 1
        )
        ways = re.findall(r'<nav class="back".*?</nav>', text)[0]
        assert links[1].removeprefix("/runs/") in ways and links[3].removeprefix("/runs/") in ways
        status, now, _ = ask(server, f"/state{links[2]}")
        assert status == 200 and json.loads(now)["finished"] and json.loads(now)["version"] in text
        for path in (
            "/runs/",
            "/runs/none.html",
            "/runs/../sweep.json",
            f"/runs/..%2f{grid.name}.html",
            "/runs//etc/passwd.html",
        ):
            assert ask(server, path)[0] == 404


def test_of_a_sweep_all_cells_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    with killed_after(2, monkeypatch):
        sweep(folder, sweep={"method.name": ["fedavg", "local"]})
    lookout = Lookout(folder)
    first = lookout.look()
    assert (first.cells, first.done, first.rounds) == (2, 0, 6) and first.words.endswith(
        "of 6 rounds, 0 of 2 runs done"
    )
    write_failure(folder / "001-local", 3, ValueError("no"))
    then = lookout.look()
    assert (then.done, then.failed) == (1, 1) and then.version != first.version
    resume(folder / "000-fedavg")
    assert lookout.look().finished and lookout.look().words == "finished, 1 of 2 failed"


def test_refusals(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        Server(tmp_path / "nowhere")
    with Server(single) as taken, pytest.raises(ConfigError, match="in use by another program"):
        Server(single, taken.port)
    for args in (
        ["--port", "0"],
        ["--live", "--markdown"],
        ["--live", "--out", "x.html"],
        ["--live", "--port", "70000"],
    ):
        with pytest.raises(SystemExit) as left:
            main(["report", str(single), *args])
        assert left.value.code == 2 and capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_the_command_ends_with_ctrl_c(single: Path) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "holdfast.cli", "report", str(single), "--live"]
    process = subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert "finished" in process.stderr.readline()
        assert "press Ctrl-C to close the page" in process.stderr.readline()  # so it serves by now
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0 and "page closed" in said and "Traceback" not in said
