"""What an operator asks about a federation, from its folder alone: its state, its clients, whether it can
start."""

from __future__ import annotations

import datetime
import importlib.metadata
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.deploy.check import Check
from holdfast.deploy.deadlines import paused
from holdfast.deploy.enrolment import Enrolment, fingerprint_of
from holdfast.deploy.keys import expires, hosts_of, public_of
from holdfast.deploy.ledger import Entry
from holdfast.deploy.ledger_check import LedgerCheck
from holdfast.deploy.processes import Processes, in_use
from holdfast.deploy.project import Project
from holdfast.storage.store import Store


def federation_status(project: Project) -> dict[str, Any]:
    """Return the state of the federation, for `status`."""
    ledger, running = examined(project).require(), Processes(project.server / "flower", project.logs).alive()
    rounds = ledger.of("round")
    result = Store(project.run).result()
    last = rounds[-1] if rounds else None
    who = Enrolment.of(ledger.entries)
    return {
        "name": project.settings.name,
        "up": bool(running),
        "processes": len(running),
        "address": project.settings.address,
        "round": last.round if last else 0,
        "accuracy": last.what.get("accuracy") if last else None,
        "finished": result is not None,
        "clients": len(who.members),
        "banned": dict(who.banned),
        "paused": paused(ledger.entries),
        "entries": len(ledger.entries),
        "head": ledger.head,
        "run": str(project.run),
    }


def examined(project: Project) -> LedgerCheck:
    """Return the ledger together with everything that it is compared with."""
    return LedgerCheck(project.ledger_file, project.run)


def clients(project: Project) -> list[dict[str, Any]]:
    """Return all clients that were ever enrolled: state, last round, weight, score, strikes and bans."""
    ledger = project.ledger()
    who, rounds = Enrolment.of(ledger.entries), ledger.of("round")
    missing = [entry for entry in ledger.of("missing") if rounds and entry.round == rounds[-1].round]
    resting = paused(ledger.entries)
    suspects = {entry.client: str(entry.what.get("reason", "")) for entry in ledger.of("suspect")}
    out = []
    for member in sorted(who.members.values(), key=lambda m: m.client):
        took_part = [entry.round for entry in rounds if member.client in entry.what.get("took_part", [])]
        said = next(
            (
                entry.what["clients"][str(member.client)]
                for entry in missing
                if str(member.client) in entry.what["clients"]
            ),
            "",
        )
        state = (
            "banned"
            if member.banned is not None
            else "left"
            if member.left
            else "paused"
            if member.client in resting
            else "active"
        )
        out.append(
            {
                "client": member.client,
                "state": state,
                "key": member.fingerprint[:16],
                "last round": took_part[-1] if took_part else None,
                "rounds": len(took_part),
                **_decided(rounds, member.client),
                "strikes": len(member.strikes),
                "why": (
                    member.banned
                    or said
                    or (member.strikes[-1] if member.strikes else "")
                    or suspects.get(member.client, "")
                ),
            }
        )
    return out


def _decided(rounds: list[Entry], client: int) -> dict[str, float | None]:
    """Return the client's weight and score in the last round that judged it."""
    found: dict[str, float | None] = {"weight": None, "score": None}
    for entry in reversed(rounds):
        ids = entry.what.get("ids", [])
        if client in ids:
            place = ids.index(client)
            scores = [
                value
                for name, value in entry.what.items()
                if name.startswith("scores/") and isinstance(value, list)
            ]
            for name, values in (
                ("weight", entry.what.get("weights")),
                ("score", scores[0] if scores else None),
            ):
                if (
                    isinstance(values, list)
                    and place < len(values)
                    and isinstance(values[place], (int, float))
                ):
                    found[name] = float(values[place])
            break
    return found


def examine(project: Project) -> Iterator[Check]:
    """Check everything that should be right before round 1."""
    yield from examined(project).examine()
    for check in (_versions, _config, _certificate, _secrets, _ports, _nodes, _clock, _disk):
        try:
            yield check(project)
        except (HoldfastError, OSError, ValueError) as error:
            yield Check(check.__name__.strip("_"), False, " ".join(str(error).split()))


def _versions(project: Project) -> Check:
    from packaging.version import Version

    flower = importlib.metadata.version("flwr")
    said = f"holdfast {importlib.metadata.version('holdfast')}, flwr {flower} (tested: 1.41)"
    return Check("versions", Version(flower).release[:2] == (1, 41), said)


def _config(project: Project) -> Check:
    from holdfast.deploy.node import expected

    config = project.check_experiment()
    many, enrolled = expected(config), len(Enrolment.of(project.ledger().entries).members)
    said = (
        f"{config.parts().method.name} for {many} clients, {config.train.rounds} rounds; {enrolled} are"
        " enrolled"
    )
    said += (
        ""
        if enrolled >= many
        else f": `holdfast federation enrol {project.path} CLIENT --key FILE.pub` for the others"
    )
    return Check("experiment", enrolled >= many, said)


def _certificate(project: Project) -> Check:
    until = min(expires(project.server / name) for name in ("ca.pem", "server.pem"))
    days, hosts = (until - datetime.datetime.now(datetime.UTC)).days, hosts_of(project.server / "server.pem")
    good = days > 0 and project.settings.host in hosts
    problem = "" if project.settings.host in hosts else f"; not good for {project.settings.host}"
    return Check("certificate", good, f"good for {', '.join(hosts)}, {days} days left{problem}")


def _secrets(project: Project) -> Check:
    secret = [
        project.server / name
        for name in ("ca.key", "server.key", "superexec.secret", "orders.key", "watch.secret")
    ]
    secret += [file for file in (project.path / "nodes").glob("*/key")]
    open_ones = [
        str(file.relative_to(project.path))
        for file in secret
        if file.exists() and file.stat().st_mode & 0o077
    ]
    said = f"{open_ones[0]} can be read by others: chmod 600" if open_ones else "readable by their owner only"
    return Check("secrets", not open_ones, said)


def _ports(project: Project) -> Check:
    up = bool(Processes(project.server / "flower", project.logs).alive())
    taken = in_use(project.settings.listen, project.settings.port)
    said = f"{project.settings.listen}:{project.settings.port} is " + ("in use" if taken else "free")
    return Check("port", taken == up, said + (" by this federation" if taken and up else ""))


def _nodes(project: Project) -> Check:
    """Check the node folders that are here: the enrolled key, the same experiment and plug-ins. A private key
    may be here, or on the node only."""
    who, wrong, keyless = Enrolment.of(project.ledger().entries), [], 0
    folders = sorted((project.path / "nodes").glob("*/node.toml"))
    for file in folders:
        folder, client = file.parent, int(file.parent.name)
        keyless += not (folder / "key").exists()
        public = public_of(folder / "key") if (folder / "key").exists() else (folder / "key.pub").read_text()
        if client in who.members and fingerprint_of(public) != who.members[client].fingerprint:
            wrong.append(f"client {client}: its key is not the enrolled one")
        for ours, name in [
            *((file, file.name) for file in (project.experiment, *project.plugins)),
            (project.server_public, "server.pub"),
        ]:
            theirs = folder / name
            if ours.exists() and (not theirs.exists() or theirs.read_bytes() != ours.read_bytes()):
                wrong.append(f"client {client}: its {name} is not the server's")
    elsewhere = f"; the private keys of {keyless} are on the nodes only" if keyless else ""
    return Check(
        "nodes",
        not wrong,
        wrong[0] if wrong else f"{len(folders)} node folders are here and match{elsewhere}",
    )


def _clock(project: Project) -> Check:
    """Check the clock: Flower refuses signatures that are seconds old, and a clock before the authority was
    made is certainly wrong."""
    now, born = datetime.datetime.now(datetime.UTC).timestamp(), (project.server / "ca.pem").stat().st_mtime
    last = max(
        (datetime.datetime.fromisoformat(entry.at).timestamp() for entry in project.ledger().entries),
        default=0.0,
    )
    return Check(
        "clock", now >= max(born, last) - 5, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )


def _disk(project: Project) -> Check:
    gigabytes = shutil.disk_usage(project.path).free / 1e9
    return Check(
        "disk",
        gigabytes > 1,
        f"{gigabytes:.1f} GB free" + ("" if gigabytes > 1 else "; a federation should have more than 1"),
    )


def logs(project: Project) -> dict[str, Path]:
    """Return the log files by name."""
    return {file.stem: file for file in sorted(project.logs.glob("*.log"))}
