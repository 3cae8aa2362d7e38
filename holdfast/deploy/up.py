"""A federation in operation: starts its processes, keeps them up, carries bans and new keys to the SuperLink,
and follows the run.

The SuperLink listens on 127.0.0.1 with a database, the proxy is the only door for nodes, and SuperExec runs
the ServerApp in a process of its own, so that a SuperLink that is killed and started again within Flower's
minute costs nothing. A run that Flower gives up (a killed ServerApp, a longer outage) is started again from
its last committed round, as long as it gets anywhere."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

from holdfast.core.errors import RunError, in_print
from holdfast.core.files import write_json
from holdfast.core.reading import read_json
from holdfast.deploy.disk import naming_a_full_disk, shortage
from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.heartbeat import ServerContact
from holdfast.deploy.keys import ready_certificates
from holdfast.deploy.ledger import Entry
from holdfast.deploy.node_processes import Say, client_of, start_again, start_node
from holdfast.deploy.processes import HOST, Processes, free_port, in_use, write_app
from holdfast.deploy.project import Project
from holdfast.deploy.refusals import ProxyStrikes
from holdfast.storage.store import Store

_LINK = "link"
_SOON, _FALLS = (
    60.0,
    5,
)  # seconds within which a part that was started again should not stop, and how often it may


class RunningFederation:
    """Use as a context manager: whatever happens, no process is left."""

    def __init__(self, project: Project, say: Say, nodes: bool = True):
        self.project, self.say, self.nodes = project, say, nodes
        self.ledger = project.ledger()
        self.port = free_port()
        self.processes = Processes(project.server / "flower", project.logs, _LINK)
        self.told, self.behind = (
            len(self.ledger.entries),
            False,
        )  # behind: the SuperLink has not heard of the latest keys and bans
        self.refusals = ProxyStrikes(project.server / "refusals.jsonl")
        self.rests: dict[str, float] = {}
        self.falls: dict[str, int] = {}
        self.rotated: set[int | None] = set()
        self.contact = ServerContact(say)

    def __enter__(self) -> RunningFederation:
        with naming_a_full_disk(self.project.server, self._goes_on):
            return self._enter()

    def _enter(self) -> RunningFederation:
        server, flower = self.project.server, self.processes.flower
        self.processes.claim(
            f"this federation is up already; see `holdfast federation status {self.project.path}`"
        )
        try:
            self.project.ready_ledger()
            ready_certificates(server, [self.project.settings.host])
            link = f'[superlink]\ndefault = "{_LINK}"\n[superlink.{_LINK}]\naddress = "{HOST}:{self.port}"\n'
            (flower / "config.toml").write_text(
                link + f"root-certificates = {json.dumps(str(server / 'ca.pem'))}\n"
            )
            if not (server / "superlink.db").exists():  # then what was noted of its nodes is of another one
                (server / "registered.json").unlink(missing_ok=True)
            self._start_superlink()
            self._start_superexec()
            self._start_proxy()
            self.register()
            self._fit_nodes(set())
            away = sorted(
                Enrolment.of(self.ledger.entries).admitted
                - {client_of(name) for name in self.processes.started}
            )
            if self.nodes and away:
                self.say(f"not on this machine, and expected to join: clients {', '.join(map(str, away))}")
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop()

    def _start_superlink(self) -> None:
        server = self.project.server
        self.processes.start(
            "superlink",
            "holdfast.deploy.flower",
            "superlink",
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--database",
            str(server / "superlink.db"),
            "--ssl-ca-certfile",
            str(server / "ca.pem"),
            "--ssl-certfile",
            str(server / "server.pem"),
            "--ssl-keyfile",
            str(server / "server.key"),
            "--enable-supernode-auth",
            "--isolation",
            "process",
            "--superexec-auth-secret-file",
            str(server / "superexec.secret"),
            "--disable-runtime-dependency-installation",
            module=True,
        )
        self.processes.wait_for_port(self.port, "superlink")

    def _start_superexec(self) -> None:
        server = self.project.server
        self.processes.start(
            "superexec",
            "holdfast.deploy.flower",
            "superexec",
            "--runtime-api-address",
            f"{HOST}:{self.port}",
            "--root-certificates",
            str(server / "ca.pem"),
            "--superexec-auth-secret-file",
            str(server / "superexec.secret"),
            module=True,
        )

    def _start_proxy(self) -> None:
        server, settings = self.project.server, self.project.settings
        if in_use(settings.listen, settings.port):
            raise RunError(
                f"{settings.listen}:{settings.port} is in use by another program; stop it, or change"
                " federation.address"
            )
        self.processes.start(
            "proxy",
            "holdfast.deploy.proxy",
            "--host",
            settings.listen,
            "--port",
            str(settings.port),
            "--upstream",
            f"https://{HOST}:{self.port}",
            "--authority",
            str(server / "ca.pem"),
            "--certificate",
            str(server / "server.pem"),
            "--key",
            str(server / "server.key"),
            "--largest",
            str(settings.largest),
            "--objects",
            str(settings.objects),
            "--quota",
            str(settings.quota),
            "--registered",
            str(server / "registered.json"),
            "--refusals",
            str(self.refusals.file),
            "--round",
            str(self.project.run / "head.json"),
            module=True,
        )
        self.processes.wait_for_port(settings.port, "proxy", settings.listen)

    def start_node(self, client: int) -> None:
        start_node(self.processes, self.project.node(client))

    def register(self) -> None:
        """Tell the SuperLink the keys of all who are welcome, and take away those of all who are not. Each is
        noted at once: a stop in between may leave one node that the SuperLink has and we do not."""
        file = self.project.server / "registered.json"
        known = read_json(file) or {}
        if not all(isinstance(node, str) and re.fullmatch(r"\d{0,20}", node) for node in known.values()):
            raise RunError(f"{file} is damaged: it does not say which key is which node of the SuperLink")
        who = Enrolment.of(self.ledger.entries)
        welcome = {m.fingerprint: m.key for m in who.members.values() if m.client in who.admitted}
        for fingerprint in [name for name, node in known.items() if node and name not in welcome]:
            self._unregister(str(known[fingerprint]))
            write_json(
                file, known := {**known, fingerprint: ""}
            )  # for good: the SuperLink never takes a key twice
        for fingerprint, key in welcome.items():
            if fingerprint not in known:
                write_json(file, known := {**known, fingerprint: self._register(key, set(known.values()))})

    def _register(self, key: str, known: set[str]) -> str:
        file = self.project.server / "registering.pub"
        file.write_text(key + "\n")
        try:
            return str(self.processes.flwr("supernode", "register", str(file), _LINK)["node-id"])
        except RunError as error:
            if "already in use" not in str(error):
                raise
            unnoted = {
                str(node["node-id"]) for node in self.processes.flwr("supernode", "list", _LINK)["nodes"]
            } - known
            if len(unnoted) != 1:
                raise RunError(
                    "the SuperLink knows a key whose node we do not know; remove server/superlink.db and"
                    " start again"
                ) from None
            return unnoted.pop()
        finally:
            file.unlink(missing_ok=True)

    def _unregister(self, node: str) -> None:
        try:
            self.processes.flwr("supernode", "unregister", node, _LINK)
        except RunError as error:
            if "not found" not in str(error):  # else it is done already, and a stop came before its note
                raise

    def run(self, timeout: float | None = None) -> dict[str, Any]:
        """Start the run, or go on with it, until it is finished."""
        with naming_a_full_disk(self.project.server, self._goes_on):
            return self._run(timeout)

    def _goes_on(self) -> str:
        command = (
            "resume" if (self.project.run / "head.json").exists() else "up"
        )  # before round 1 there is nothing to resume
        return f"`holdfast federation {command} {self.project.path}` goes on"

    def _run(self, timeout: float | None) -> dict[str, Any]:
        result = self.project.run / "result.json"
        end = None if timeout is None else time.monotonic() + timeout
        standing = 0  # runs in a row that have ended without a word and without a round: one may be bad luck
        while not result.exists():
            before = self._committed()
            status, why = self._one_run(end)
            if result.exists():
                break
            reason = self._reason()
            standing = standing + 1 if self._committed() == before else 0
            if reason is not None or standing == 2:
                raise RunError(f"the run stopped ({reason or why or status}); {self._goes_on()}")
            self.say(f"the run stopped in round {self._committed() + 1} ({why or status}) and goes on")
        self._report()
        content = Store(self.project.run).result()
        assert content is not None
        return content

    def _one_run(self, end: float | None) -> tuple[str, str]:
        settings = self.project.settings
        (self.project.server / "stopped.json").unlink(missing_ok=True)
        waits = {name: float(getattr(settings, name)) for name in ("deadline", "join", "quorum", "wait")}
        app = write_app(
            self.project.server / "app",
            {
                "config": str(self.project.experiment),
                "out": str(self.project.run),
                "ledger": str(self.ledger.path),
                "strikes": settings.strikes,
                "plugins": "\n".join(map(str, self.project.plugins)),
                **waits,
            },
        )
        run = str(self.processes.flwr("run", str(app), _LINK)["run-id"])
        try:
            return self._follow(run, end)
        finally:
            self.processes.keep_log(run)

    def _follow(self, run: str, end: float | None) -> tuple[str, str]:
        asked, result = 0.0, self.project.run / "result.json"
        while True:
            self._mend()
            self.refusals.add_to(self.ledger)
            self._report()
            # A question costs Flower's command line a second of computing, so it is asked seldom until the
            # run has said its last word.
            if time.monotonic() - asked > (1 if result.exists() else 10):
                try:
                    listed = self.processes.flwr("list", _LINK, "--run-id", run)["runs"][0]
                    if listed["status"].startswith("finished"):
                        return listed["status"], listed.get("status-details", "")
                except RunError:  # the SuperLink is just being started again, unless its disk is full
                    if shortage(self.project.server):
                        raise
                asked = time.monotonic()
            if end is not None and time.monotonic() > end:
                raise RunError(
                    "the federation has not finished in time; `holdfast federation resume"
                    f" {self.project.path}` continues it"
                )
            time.sleep(1)

    def _mend(self) -> None:
        """What has died or hangs is started again; a node is given the minute for which Flower still thinks
        it is there. A part of the server that dies within that time again and again cannot be helped by
        starting it, and nothing can on a full disk."""
        self.processes.end_frozen()
        self.contact.report(self.processes.running())
        for name in list(self.processes.started):
            process = self.processes.started[name]
            if process.poll() is None or time.monotonic() < self.rests.get(name, 0.0):
                continue
            soon = time.monotonic() < self.rests.get(name, -math.inf) + _SOON
            self.falls[name] = self.falls.get(name, 0) + 1 if soon else 1
            if client_of(name) is None and self.falls[name] > _FALLS:
                log = self.project.logs / f"{name}.log"
                raise RunError(
                    f"{name} has stopped {_FALLS + 1} times in a row, with code {process.returncode}; see"
                    f" {log}"
                )
            if shortage(self.project.server):
                raise RunError(f"{name} {self.processes.how_it_ended(name)}")
            self.rests[name] = (
                time.monotonic() + 10
            )  # what dies again and again must not keep the machine busy with its starts
            self.say(f"{name} {self.processes.how_it_ended(name)} and is started again")
            self._start_again(name)

    def _start_again(self, name: str) -> None:
        own = {
            "superlink": self._start_superlink,
            "superexec": self._start_superexec,
            "proxy": self._start_proxy,
        }
        if name in own:
            own[name]()
        elif (client := client_of(name)) is not None:
            if client in Enrolment.of(self.ledger.entries).admitted:
                start_again(self.processes, self.project.node(client), name)
            else:
                del self.processes.started[name]

    def _report(self) -> None:
        """Say what the ledger says, and carry bans and new keys to the SuperLink."""
        self.ledger.refresh()
        news = self.ledger.entries[self.told :]
        self.told = len(self.ledger.entries)
        for entry in news:
            if line := in_words(entry):
                self.say(line)
        self.rotated |= {entry.client for entry in news if entry.kind == "rotate"}
        self.behind |= any(entry.kind in ("ban", "unban", "enrol", "rotate", "leave") for entry in news)
        if self.behind:
            try:
                self.register()
                self.behind = False
            except (
                RunError
            ) as error:  # the SuperLink is just being started again; whoever is banned is sent nothing anyway
                self.say(f"the SuperLink could not be told, and will be: {error}")
                return
            self._fit_nodes(self.rotated)
            self.rotated = set()

    def _fit_nodes(self, rotated: set[int | None]) -> None:
        """Nodes here follow the ledger: who has come or come back is started, who has a new key is started
        again with it, who is no longer welcome is stopped."""
        welcome = Enrolment.of(self.ledger.entries).admitted
        for name in list(self.processes.started) if self.nodes else []:
            client = client_of(name)
            if client is not None and (client in rotated or client not in welcome):
                self.processes.end(name)
        for client in sorted(welcome) if self.nodes else []:
            if f"node{client}" not in self.processes.started and (self.project.node(client) / "key").exists():
                self.start_node(client)

    def _committed(self) -> int:
        return Store(self.project.run).round() or 0

    def _reason(self) -> str | None:
        """What the ServerApp itself said why it stopped; nothing where it was killed."""
        reason = (read_json(self.project.server / "stopped.json") or {}).get("reason")
        return None if reason is None else in_print(str(reason))[:500]


def in_words(entry: Entry) -> str:
    """What the operator is told of an entry; nothing of those that say little."""
    who, what = f"client {entry.client}", entry.what
    if entry.kind == "round":
        accuracy = what.get("accuracy")
        measured = f", accuracy {accuracy:.3f}" if accuracy is not None else ""
        refused = f", {len(what['refused'])} refused" if what.get("refused") else ""
        return f"round {entry.round}: {len(what.get('took_part', []))} took part{refused}{measured}"
    return {
        "start": "the run begins",
        "resume": f"the run goes on after round {entry.round}",
        "ban": f"{who} is banned in round {entry.round}: {what.get('reason')}",
        "unban": f"{who} is let in again: {what.get('reason')}",
        "strike": f"{who}, round {entry.round}: {what.get('reason')}",
        "enrol": f"{who} is enrolled",
        "rotate": f"{who} has a new key",
        "stranger": f"a stranger was turned away: {what.get('reason')}",
        "finish": "the run is finished",
        "leave": f"{who} has left",
        "wait": (
            f"round {entry.round}: waiting up to {what.get('seconds', 0):g} s for more clients;"
            f" {what.get('answered')} answered, not {_each(what.get('clients', {}))}"
        ),
        "reset": f"the operator has accepted that a part of the ledger is lost: {what.get('reason')}",
        "pause": (
            f"{who} has not answered several times in a row and is not asked before round {what.get('until')}"
        ),
        "suspect": f"{who}, round {entry.round}: {what.get('reason')}",
        "missing": f"round {entry.round}: no answer from {_each(what.get('clients', {}))}",
    }.get(entry.kind, "")


def _each(clients: dict[str, str]) -> str:
    """Flower explains an error after a dash, at length: the log has it."""
    return "; ".join(
        f"client {client} ({reason.partition(' — ')[0][:120]})" for client, reason in clients.items()
    )
