"""What the ledger proves: run, signed head and written-down heads against it; kills in between; what an
operator does about a loss."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.deploy import ledger as ledger_module  # noqa: E402
from holdfast.deploy.keys import make_server_key  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.ledger_check import LedgerCheck  # noqa: E402
from holdfast.deploy.ledger_keeping import accept_ledger, ready_ledger  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, init, open_project  # noqa: E402
from holdfast.deploy.signed_head import SignedHead, read_signed_head  # noqa: E402
from holdfast.storage.store import Store  # noqa: E402
from tests.deploy.keyed_world import World, spoil  # noqa: E402
from tests.deploy.worlds import simulate, write_config  # noqa: E402

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation's folder after a run of two rounds in which client 1 was banned, still without a result:
    it could go on."""
    project = init(tmp_path_factory.mktemp("played") / "ward", 3, port=free_port(), node_keys=False)
    world = World(project.server, rounds=2, strikes=1)
    world.run(spoil(1))
    world.out.rename(project.run)
    (project.run / "result.json").unlink()
    return project.path


@pytest.fixture
def project(played: Path, tmp_path: Path) -> Project:
    shutil.copytree(played, tmp_path / "ward")
    return open_project(tmp_path / "ward")


def look(project: Project, head: str | None = None) -> dict[str, str]:
    """What is wrong."""
    return {
        check.what: check.said
        for check in LedgerCheck(project.ledger_file, project.run).examine(head)
        if not check.good
    }


def rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Take lines out and recompute the chain, as whoever can write the file could."""
    before, out = "0" * 64, b""
    for line in filter(keep, map(json.loads, path.read_bytes().splitlines())):
        line |= {"number": out.count(b"\n"), "before": before}
        data = json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        before, out = hashlib.sha256(data).hexdigest(), out + data
    path.write_bytes(out)


def without_bans(project: Project) -> None:
    rewrite(project.ledger_file, lambda line: line["kind"] not in ("ban", "strike"))


def without_bans_and_signature(project: Project) -> None:
    """Also as if nothing had ever been signed."""
    rewrite(project.ledger_file, lambda line: line["kind"] not in ("ban", "strike", "server-key"))
    for name in ("ledger.head", "orders.key", "orders.pub"):
        (project.server / name).unlink()


def empty(project: Project) -> None:
    project.ledger_file.write_bytes(b"")


def missing(project: Project) -> None:
    """The file, and what is signed."""
    project.ledger_file.unlink()
    (project.server / "ledger.head").unlink()


def older(project: Project) -> None:
    """A backup from before round 2, with its signed head; run/ is newer."""
    lines = project.ledger_file.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if json.loads(line)["kind"] == "round") + 1
    project.ledger_file.write_bytes(b"".join(lines[: place - 1]))
    (project.server / "ledger.head").unlink()
    ledger = Ledger(project.ledger_file)
    ledger.sign()


@pytest.mark.parametrize("harm", [without_bans, without_bans_and_signature, empty, missing, older])
def test_a_ledger_that_is_not_the_runs_is_refused_everywhere(
    harm: Callable[[Project], None], project: Project, ask: Ask, roomy: None
) -> None:
    for command in ("verify", "doctor"):
        assert ask(command, project.path)[0] == 0
    harm(project)
    ward = project.path
    for command in ("verify", "doctor"):
        code, out, _ = ask(command, ward)
        assert code == 1 and "BAD" in out and "lines were removed" in out, (command, out)
    for args in (("status", ward), ("up", ward), ("resume", ward), ("ban", ward, 0), ("enrol", ward, 2)):
        code, out, err = ask(*args)
        assert (
            code == 2
            and len(err.splitlines()) == 1
            and "lines were removed" in err
            and "accept-ledger" in err
        ), (args, err)
    assert (
        not (project.server / "superlink.db").exists()
        and not (project.server / "flower" / "config.toml").exists()
    )


def test_a_run_and_a_ledger_prove_each_other(project: Project) -> None:
    ledger = project.ledger()
    head = json.loads((project.run / "head.json").read_text())
    assert head.keys() == {"round", "state", "ledger"} and ledger.had(**head["ledger"])
    state = project.run / head["state"]
    last = ledger.of("round")[-1]
    assert (
        last.round == head["round"] == 2
        and last.what["model"] == hashlib.sha256(state.read_bytes()).hexdigest()
    )
    assert all(len(entry.what["model"]) == 64 for entry in ledger.of("round"))
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    assert look(project).keys() == {"model"} and "is not the state whose SHA-256" in look(project)["model"]
    state.unlink()
    assert "is missing" in look(project)["model"]


def test_a_run_that_is_older_than_the_ledger_is_refused(project: Project) -> None:
    head = json.loads((project.run / "head.json").read_text())
    (project.run / "head.json").write_text(
        json.dumps({**head, "round": 1, "state": "state/000001.safetensors"})
    )
    (project.run / "state/000002.safetensors").rename(project.run / "state/000001.safetensors")
    assert "is older than the ledger: it ends with round 1" in look(project)["run"]


def test_a_simulated_run_has_nothing_more_in_its_head(tmp_path: Path) -> None:
    simulate(write_config(tmp_path, "fedavg", rounds=1), tmp_path / "sim")
    assert (
        tmp_path / "sim/head.json"
    ).read_bytes() == b'{\n "round": 1,\n "state": "state/000001.safetensors"\n}\n'


def test_the_signed_head(project: Project) -> None:
    file = project.server / "ledger.head"
    signed, content = read_signed_head(file), file.read_text()
    assert (
        signed is not None
        and signed.is_signed_by(project.server_public.read_text())
        and signed.head == project.ledger().head
    )
    for harm in (
        {"entries": signed.entries - 1},
        {"at": "2020-01-01T00:00:00+00:00"},
        {"signature": "00" * 100},
    ):
        file.write_text(json.dumps(json.loads(content) | harm))
        assert look(project) == {"signed head": f"{file}: the signature is not valid"}
    for harm in (
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"entries": 1, "head": "x", "at": "", "signature": ""}',
        b" " * 100_000,
    ):
        file.write_bytes(harm)
        assert "is damaged" in look(project)["signed head"] and len(look(project)) == 1
    file.write_text(content)
    (project.server / "orders.key").unlink()
    assert look(project) == {}  # who only verifies needs no private key
    make_server_key(project.server)
    assert "not the key that the ledger names" in look(project)["signed head"]
    with pytest.raises(RunError, match="not the key that the ledger names"):
        project.ready_ledger()


def test_a_head_that_was_kept_elsewhere_is_checked(project: Project, ask: Ask, tmp_path: Path) -> None:
    ledger, ward = project.ledger(), project.path
    noted = shutil.copy(project.server / "ledger.head", tmp_path / "noted")
    assert (
        ask("verify", ward, "--head", ledger.head)[0]
        == ask("verify", ward, "--head", ledger.heads[3][:16])[0]
        == 0
    )
    code, out, _ = ask("verify", ward, "--head", noted, "--json")
    assert code == 0 and json.loads(out)[-1]["said"].startswith(
        f"it was the head after {len(ledger.entries)} of {len(ledger.entries)}"
    )
    assert ask("verify", ward, "--head", "0" * 64)[0] == ask("verify", ward, "--head", "ab" * 32)[0] == 1
    assert "neither a head" in look(project, "nowhere")["given head"]
    # Whoever has the server's key rewrites everything, and only the head that is elsewhere tells.
    without_bans(project)
    head = json.loads((project.run / "head.json").read_text())
    entries = head["ledger"]["entries"] - 2  # the strike and the ban
    (project.run / "head.json").write_text(
        json.dumps({**head, "ledger": {"entries": entries, "head": project.ledger().heads[entries]}})
    )
    project.ledger().sign(anew=True)
    assert look(project) == {} and look(project, str(noted)).keys() == look(project, ledger.head).keys() == {
        "given head"
    }
    other = init(tmp_path / "other", 1, port=free_port())
    assert "not signed by the key" in look(project, str(other.server / "ledger.head"))["given head"]


class Kill(BaseException):
    """A process that is killed: nothing after it is done."""


_POINTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "before the commit": (Store, "commit", lambda store, round: round == 1),
    "between commit and ledger": (Store, "tidy", lambda store, round: round == 1),
    "before the line of the round": (
        Ledger,
        "append",
        lambda ledger, kind, *args, **what: (kind, args[1:2]) == ("round", (1,)),
    ),
    "between ledger and signed head": (Ledger, "sign", lambda ledger: bool(ledger.of("round"))),
    "before the signed head is there": (
        ledger_module,
        "write_atomically",
        lambda path, content: b'"entries": 6' in content,
    ),
    "before the finish is signed": (Ledger, "sign", lambda ledger: bool(ledger.of("finish"))),
}


@pytest.mark.parametrize("point", _POINTS)
def test_a_kill_between_commit_ledger_and_signed_head_is_no_tampering(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left is accepted, and the next start goes on: every round is told once, with its digest, and
    signed."""
    world = World(tmp_path, rounds=2)
    ledger = ready_ledger(world.ledger.path, world.out)
    owner, name, now = _POINTS[point]
    real = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if now(*args, **kwargs):
            raise Kill
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(owner, name, killed)
        world.run()
    assert [check for check in LedgerCheck(ledger.path, world.out).examine() if not check.good] == []
    ready_ledger(ledger.path, world.out)
    world.run(attempt=2)
    told = world.ledger.of("round")
    assert [entry.round for entry in told] == [1, 2] and all(len(entry.what["model"]) == 64 for entry in told)
    assert len(world.ledger.of("finish")) == 1
    signed = read_signed_head(tmp_path / "ledger.head")
    assert signed is not None and signed.head == world.ledger.head
    assert all(check.good for check in LedgerCheck(ledger.path, world.out).examine())


def test_the_server_app_itself_refuses_to_go_on(tmp_path: Path) -> None:
    """Also without `up`, and without a key: by the run's head file alone."""
    world = World(tmp_path, rounds=2)
    world.run()
    (world.out / "result.json").unlink()
    rewrite(world.ledger.path, lambda line: line["kind"] != "round")
    world.ledger = Ledger(world.ledger.path)
    with pytest.raises(RunError, match="lines were removed or changed"):
        world.run(attempt=2)


def test_an_older_federation_gets_a_key_and_a_signed_head(project: Project, played: Path) -> None:
    """A ledger without `server-key`, rounds without digests, a head file that does not name the ledger."""
    rewrite(
        project.ledger_file,
        lambda line: line["kind"] != "server-key" and line["what"].pop("model", True) is not None,
    )
    for name in ("ledger.head", "orders.key", "orders.pub"):
        (project.server / name).unlink()
    head = json.loads((project.run / "head.json").read_text())
    head.pop("ledger")
    (project.run / "head.json").write_text(json.dumps(head))
    assert look(project) == {}
    project.ready_ledger()
    assert look(project) == {} and (project.server / "orders.key").stat().st_mode & 0o777 == 0o600
    assert [entry.kind for entry in project.ledger().entries][-1] == "server-key"
    (project.server / "ledger.head").unlink()
    assert "is missing" in look(project)["signed head"]
    empty(project)
    assert "records 0 rounds of this run" in look(project)["run"]


@pytest.mark.parametrize(
    "harm",
    [without_bans, without_bans_and_signature, empty, missing, older, "damaged", "key", "model", "run"],
)
def test_the_operator_can_accept_a_loss(harm: Any, project: Project, ask: Ask, roomy: None) -> None:
    """It is written down for good, the federation is not stuck, and whoever has the old head still sees the
    difference."""
    ward, old = project.path, project.ledger().head
    code, _, err = ask("accept-ledger", ward, "--reason", "x")
    assert code == 2 and "there is nothing to accept" in err
    if harm == "damaged":
        lines = project.ledger_file.read_bytes().splitlines(keepends=True)
        project.ledger_file.write_bytes(b"".join(lines[:5] + [b"rubbish\n"] + lines[5:]))
    elif harm == "key":
        (project.server / "orders.key").unlink()
    elif harm == "model":
        (project.run / "state/000002.safetensors").write_bytes(b"other")
    elif harm == "run":
        head = json.loads((project.run / "head.json").read_text())
        (project.run / "head.json").write_text(
            json.dumps({**head, "round": 1, "state": "state/000001.safetensors"})
        )
        (project.run / "state/000002.safetensors").rename(project.run / "state/000001.safetensors")
    else:
        harm(project)
    code, out, err = ask("accept-ledger", ward, "--reason", "the disk failed")
    assert code == 0 and "accepted" in out, err
    assert ask("verify", ward)[0] == 0, look(project)
    project.ready_ledger()
    (entry,) = project.ledger().of("reset")
    assert entry.what["reason"] == "the disk failed" and entry.what["by"] == "operator"
    kept = harm in ("key", "model", "run")
    assert bool(look(project, old)) != kept
    if harm == "damaged":
        (damaged,) = project.server.glob("ledger-damaged-*.jsonl")
        assert b"rubbish" in damaged.read_bytes()
    assert project.ledger().last_round(LedgerCheck(project.ledger_file, project.run).run) <= (
        Store(project.run).round() or 0
    )
    with pytest.raises(ConfigError, match="nothing to accept"):
        accept_ledger(project.ledger_file, project.run, "again")


def test_a_loss_without_the_servers_signature_is_not_accepted(project: Project) -> None:
    """Without the key: a forged `reset` is not signed, and what was signed before is not its chain's."""
    head = json.loads((project.run / "head.json").read_text())
    without_bans(project)
    project.ledger().append(
        "reset", None, 2, reason="nothing", by="operator", lost=[head["ledger"]], run="fed"
    )
    assert look(project).keys() == {"run", "signed head"}
    with pytest.raises(RunError, match="were removed or changed"):
        project.ledger().sign()


def test_a_loss_goes_on_to_the_end(tmp_path: Path) -> None:
    """An empty ledger, accepted in the middle of a run: its rounds are told again, and the run finishes."""
    world = World(tmp_path, rounds=2)
    ready_ledger(world.ledger.path, world.out)
    enrolled = [(entry.client, entry.what["key"]) for entry in world.ledger.of("enrol")]
    world.run()
    (world.out / "result.json").unlink()
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    ledger = accept_ledger(world.ledger.path, world.out, "the disk failed")
    for client, key in enrolled:
        ledger.append("enrol", client, key=key)
    world.ledger = Ledger(ledger.path)
    world.run(attempt=2)
    assert [entry.round for entry in world.ledger.of("round")] == [1, 2] and len(
        world.ledger.of("finish")
    ) == 1
    assert all(check.good for check in LedgerCheck(ledger.path, world.out).examine())


def test_a_ledger_that_is_taken_away_while_it_is_read_is_missed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.append("start")
    ledger.path.unlink()
    with pytest.raises(RunError, match="is missing"):
        ledger.refresh()


def test_a_signed_head_travels_as_bytes(tmp_path: Path) -> None:
    make_server_key(tmp_path)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("start")
    ledger.sign()
    signed = SignedHead.parse((tmp_path / "ledger.head").read_bytes())
    assert (signed.entries, signed.head) == (1, ledger.head) and SignedHead.parse(signed.to_bytes()) == signed
