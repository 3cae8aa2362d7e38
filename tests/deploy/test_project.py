"""A federation's folder: keys and certificates, the operator's commands that need no process."""

from __future__ import annotations

import datetime
import json
import os
import socket
import ssl
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")


from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.deploy import keys  # noqa: E402
from holdfast.deploy.check import Check  # noqa: E402
from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.inspect import examine  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, enrol, init, open_node, open_project  # noqa: E402


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return init(tmp_path / "ward", 3, port=free_port())


def test_a_new_federation_is_ready(project: Project, roomy: None) -> None:
    assert open_project(project.path).settings == project.settings
    who = Enrolment.of(project.ledger().entries)
    assert who.admitted == {0, 1, 2}
    for client in range(3):
        folder = project.node(client)
        assert open_node(folder).client == client and (folder / "key").stat().st_mode & 0o077 == 0
        assert who.client_of((folder / "key.pub").read_text()) == client
        assert fingerprint_of(keys.public_of(folder / "key")) == who.members[client].fingerprint
    checks = list(examine(project))
    assert len(checks) == 12 and [check for check in checks if not check.good] == []
    assert all(
        folder.stat().st_mode & 0o077 == 0 for folder in (project.server, project.node(0))
    )  # logs and updates are secrets too
    assert "private" not in project.ledger().path.read_text().lower()


def test_the_server_is_good_for_its_names_and_signed_by_the_authority(tmp_path: Path) -> None:
    project = init(tmp_path / "ward", 1, ["fl.example.org", "10.0.0.7"])
    assert project.settings.address == "fl.example.org:8443" and project.settings.listen == "0.0.0.0"
    assert keys.hosts_of(project.server / "server.pem") == [
        "localhost",
        "fl.example.org",
        "127.0.0.1",
        "10.0.0.7",
    ]
    assert keys.expires(project.server / "server.pem") > datetime.datetime.now(
        datetime.UTC
    ) + datetime.timedelta(days=300)
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=project.server / "ca.pem"),
    )
    server.load_cert_chain(project.server / "server.pem", project.server / "server.key")
    for name, good in (("10.0.0.7", True), ("localhost", True), ("elsewhere.org", False)):
        ends = [ssl.MemoryBIO() for _ in range(2)]
        asks, answers = (
            client.wrap_bio(ends[0], ends[1], server_hostname=name),
            server.wrap_bio(ends[1], ends[0], server_side=True),
        )
        try:
            for step in (asks, answers, asks, answers, asks):
                try:
                    step.do_handshake()
                except ssl.SSLWantReadError:
                    continue
            assert good
        except ssl.SSLCertVerificationError:
            assert not good


def test_a_key_is_never_overwritten_and_a_new_one_replaces_the_old(project: Project) -> None:
    with pytest.raises(ConfigError, match="is never overwritten"):
        keys.make_node_key(project.node(1), "again")
    old = (project.node(1) / "key.pub").read_text()
    enrol(project, 1)
    who = Enrolment.of(project.ledger().entries)
    assert who.client_of(old) is None and who.client_of((project.node(1) / "key.pub").read_text()) == 1
    enrol(project, 3)
    assert Enrolment.of(project.ledger().entries).admitted == {0, 1, 2, 3}


def test_the_doctor_finds_what_is_wrong(project: Project) -> None:
    (project.server / "ca.key").chmod(0o644)
    (project.node(2) / "experiment.toml").write_text("seed = 5")
    lines = project.ledger().path.read_bytes().splitlines(keepends=True)
    project.ledger().path.write_bytes(b"".join(lines[:1] + lines[2:]))
    bad = {check.what: check.said for check in examine(project) if not check.good}
    assert "ca.key can be read by others" in bad["secrets"] and "line 2 does not follow" in bad["ledger"]


def test_the_doctor_says_what_is_wrong_with_the_machine(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=287e6))
    tomorrow = time.time() + 86400
    os.utime(project.server / "ca.pem", (tomorrow, tomorrow))
    with socket.create_server(("127.0.0.1", project.settings.port)):
        bad = {check.what: check.said for check in examine(project) if not check.good}
    assert bad.keys() == {"disk", "clock", "port"}
    assert bad["disk"] == "0.3 GB free; a federation should have more than 1"
    assert bad["port"] == f"127.0.0.1:{project.settings.port} is in use"


def test_an_expired_certificate_is_reported_and_renewed(project: Project) -> None:
    def remove() -> None:
        for name in ("server.pem", "server.key"):
            (project.server / name).unlink()

    remove()
    keys.make_server_certificate(project.server, ["fl.example.org"], days=0)
    with pytest.raises(ConfigError, match="server.pem expired on .*; remove server.pem and server.key"):
        keys.ready_certificates(project.server, ["fl.example.org"])
    remove()
    keys.ready_certificates(project.server, ["fl.example.org"])
    assert "fl.example.org" in keys.hosts_of(project.server / "server.pem")
    (project.server / "ca.pem").unlink()
    with pytest.raises(ConfigError, match="ca.pem is not a readable certificate"):
        keys.ready_certificates(project.server, [])


def test_the_operators_commands(
    ask: Callable[..., tuple[int, str, str]], tmp_path: Path, roomy: None
) -> None:
    ward: Any = tmp_path / "ward"
    assert ask("init", ward, "--clients", 2, "--port", free_port())[0] == 0 and (ward / "README.md").exists()
    code, out, _ = ask("doctor", ward)
    assert code == 0, out
    code, out, _ = ask("ban", ward, 1, "--reason", "its disk was stolen")
    head = open_project(ward).ledger().head
    assert code == 0 and head in out
    told = {row["client"]: row for row in json.loads(ask("clients", ward, "--json")[1])}
    assert (
        told[1]["state"] == "banned"
        and told[1]["why"] == "its disk was stolen"
        and told[0]["state"] == "active"
    )
    assert json.loads(ask("status", ward, "--json")[1])["banned"] == {"1": "its disk was stolen"}
    assert ask("unban", ward, 1)[0] == 0 and ask("enrol", ward, 1)[0] == 0 and ask("leave", ward, 0)[0] == 0
    assert {row["state"] for row in json.loads(ask("clients", ward, "--json")[1])} == {"left", "active"}
    for args, said in {
        ("init", ward, "--clients", 2): "is not empty",
        ("ban", ward, 7): "there is no client 7",
        ("unban", ward, 1): "client 1 is not banned",
        ("leave", ward, 0): "client 0 is not in the federation",
        ("status", tmp_path): "no federation.toml",
        ("node", tmp_path): "no node.toml",
        ("enrol", ward, "--", -1): "clients are numbered from 0",
        ("resume", ward): "has no run to continue yet",
        ("logs", ward, "nod3"): "there is no log 'nod3'",
        ("export", ward, "a.bin"): "must end in .safetensors",
        ("export", ward, tmp_path / "a.safetensors", "--node", ward / "nodes" / "1"): "has no model yet",
    }.items():
        code, out, err = ask(*args)
        assert code == 2 and said in err and len(err.splitlines()) == 1, (args, err)
    (ward / "federation.toml").write_text("quorum = 2\n")
    assert "federation.quorum" in ask("status", ward)[2]
    for address in ("fl.example.org", ":8443", "fl.example.org:port", "fl.example.org:70000"):
        (ward / "federation.toml").write_text(f'address = "{address}"\n')
        assert "federation.address: must be host:port" in ask("status", ward)[2]


def test_an_experiment_that_cannot_be_played_leaves_nothing(
    ask: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "e.toml"
    file.write_text('attack = "ipm"\n[data]\nclients = 2\n')
    code, _, err = ask("init", tmp_path / "ward", "--clients", 2, "--experiment", file)
    assert code == 2 and "only the simulator has attackers" in err and not (tmp_path / "ward").exists()
    file.write_text("[data]\nclients = 5\n")
    assert (
        "is for 5 clients, not 2" in ask("init", tmp_path / "ward", "--clients", 2, "--experiment", file)[2]
    )


@pytest.mark.parametrize("text", ["seed = 3\n", "[data] # ours\nheld_out = 0\n", "[data]", ""])
def test_an_experiment_without_a_number_of_clients_gets_it(
    ask: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "e.toml"
    file.write_text(text)
    code, _, err = ask("init", tmp_path / "ward", "--clients", 3, "--experiment", file)
    assert code == 0, err
    written = (tmp_path / "ward" / "experiment.toml").read_text()
    assert tomllib.loads(written)["data"]["clients"] == 3
    assert written.replace("\nclients = 3", "").strip() in (text.strip(), f"{text}\n[data]".strip())


HOSTILE = (
    "records [/x], \x1b]8;;https://evil.example\x07[link=https://evil.example]click[/link]\x1b[2J"
    " \u202e:smile:\ud800"
)


def test_text_from_outside_is_shown_as_it_is_and_never_obeyed(
    ask: Callable[..., tuple[int, str, str]],
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roomy: None,
) -> None:
    """A node names its fields as it likes, and the names end up in strikes, bans and logs: no markup, no
    link, no terminal sequence."""
    ward, ledger = project.path, project.ledger()
    ledger.append("strike", 0, 1, reason=HOSTILE)
    ledger.append("ban", 1, reason=HOSTILE, by="strikes")
    ledger.append("missing", None, 1, task="train", clients={"2": HOSTILE})
    ledger.append("round", None, 1, took_part=[0])
    project.logs.mkdir(parents=True, exist_ok=True)
    (project.logs / "node0.log").write_text(f"\x1b[92mINFO\x1b[0m : {HOSTILE[:-1]}\n")
    monkeypatch.setattr("holdfast.deploy.inspect._disk", lambda project: Check("disk", False, HOSTILE))
    for args, code in {
        ("clients", ward): 0,
        ("logs", ward, "node0"): 0,
        ("doctor", ward): 1,
        ("status", ward): 0,
        ("ban", ward, 1): 2,
        ("leave", ward, 1): 2,
        ("enrol", ward, 1): 0,
    }.items():
        found, out, err = ask(*args)
        said = out + err
        assert found == code and all(letter.isprintable() for letter in said.replace("\n", "")), (args, said)
        told = "".join(said.split())  # a narrow column is folded
        assert args[0] == "status" or "[/x],[link=https://evil.example]click[/link]:smile:" in told, (
            args,
            said,
        )
    assert ask("logs", ward, "node0")[1].startswith("INFO : records")
