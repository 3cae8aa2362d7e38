"""A running federation: starts its processes, restarts them, brings bans and new keys to the SuperLink, and
follows the run.

The SuperLink listens on 127.0.0.1 with a database, the proxy has the only public port, and SuperExec runs the
ServerApp in a process of its own, so that a SuperLink that is killed and started again within Flower's minute
costs nothing. A run that Flower gives up (a killed ServerApp, a longer outage) is started again from its last
committed round, as long as it gets anywhere."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError, in_print
from holdfast.core.reading import read_json
from holdfast.deploy.disk import naming_a_full_disk, shortage
from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.flower_app import write_app
from holdfast.deploy.heartbeat import ServerContact
from holdfast.deploy.keys import ready_certificates
from holdfast.deploy.ledger_lines import line_of
from holdfast.deploy.metrics import MetricsServer
from holdfast.deploy.node_processes import Say, client_of, start_again, start_node
from holdfast.deploy.processes import HOST, Processes, free_port, in_use, options
from holdfast.deploy.project import Project
from holdfast.deploy.refusals import ProxyStrikes
from holdfast.deploy.registered import RegisteredKeys
from holdfast.storage.store import Store

_LINK = "link"
_SELDOM = 60.0  # seconds between two questions how a run stands, while all seems well
_SOON = 60.0  # seconds within which a restarted process should not stop again
_MOST_STOPS = 5  # of a process of the server in a row, each within that time


class RunningFederation:
    """The processes of `holdfast federation up`. Use as a context manager: on exit no process is left."""

    def __init__(self, project: Project, say: Say, nodes: bool = True):
        self.project, self.say, self.nodes = project, say, nodes
        self.ledger = project.ledger()
        self.port = free_port()
        self.processes = Processes(project.server / "flower", project.logs, _LINK)
        self.reported = len(self.ledger.entries)
        self.outdated = False  # whether the SuperLink lacks the latest keys and bans
        self.keys = RegisteredKeys(project.server, self._register, self._unregister)
        self.refusals = ProxyStrikes(project.server / "refusals.jsonl")
        self.not_before: dict[str, float] = {}
        self.stops: dict[str, int] = {}
        self.rotated: set[int | None] = set()
        self.contact = ServerContact(say)
        self.metrics: MetricsServer | None = None

    def __enter__(self) -> RunningFederation:
        with naming_a_full_disk(self.project.server, self._how_to_continue):
            return self._enter()

    def _enter(self) -> RunningFederation:
        server, flower = self.project.server, self.processes.flower
        self.processes.claim(
            f"this federation is running already; see `holdfast federation status {self.project.path}`"
        )
        try:
            self.project.ready_ledger()
            ready_certificates(server, [self.project.settings.host])
            link = f'[superlink]\ndefault = "{_LINK}"\n[superlink.{_LINK}]\naddress = "{HOST}:{self.port}"\n'
            (flower / "config.toml").write_text(
                link + f"root-certificates = {json.dumps(str(server / 'ca.pem'))}\n"
            )
            if not (server / "superlink.db").exists():  # then the noted nodes belong to another database
                self.keys.forget()
            self._start_superlink()
            self._start_superexec()
            self._start_proxy()
            self._serve_metrics()
            self.register()
            self._start_nodes()
            away = sorted(
                Enrolment.of(self.ledger.entries).admitted
                - {client_of(name) for name in self.processes.started}
            )
            if self.nodes and away:
                self.say(f"expected to join from other machines: clients {', '.join(map(str, away))}")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.processes.stop()

    def _serve_metrics(self) -> None:
        if port := self.project.settings.metrics:
            self.metrics = MetricsServer(self.project, port)
            self.say(f"metrics are at {self.metrics.url}")

    def _start_superlink(self) -> None:
        server = self.project.server
        self.processes.start(
            "superlink",
            "holdfast.deploy.flower",
            "superlink",
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            *options(
                host=HOST,
                port=self.port,
                database=server / "superlink.db",
                ssl_ca_certfile=server / "ca.pem",
                ssl_certfile=server / "server.pem",
                ssl_keyfile=server / "server.key",
                isolation="process",
                superexec_auth_secret_file=server / "superexec.secret",
            ),
            module=True,
        )
        self.processes.wait_for_port(self.port, "superlink")

    def _start_superexec(self) -> None:
        server = self.project.server
        self.processes.start(
            "superexec",
            "holdfast.deploy.flower",
            "superexec",
            *options(
                runtime_api_address=f"{HOST}:{self.port}",
                root_certificates=server / "ca.pem",
                superexec_auth_secret_file=server / "superexec.secret",
            ),
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
            *options(
                host=settings.listen,
                port=settings.port,
                upstream=f"https://{HOST}:{self.port}",
                authority=server / "ca.pem",
                certificate=server / "server.pem",
                key=server / "server.key",
                largest=settings.largest,
                objects=settings.objects,
                quota=settings.quota,
                registered=server / "registered.json",
                refusals=self.refusals.file,
                traffic=server / "traffic.json",
                round=self.project.run / "head.json",
                notices=server,
            ),
            module=True,
        )
        self.processes.wait_for_port(settings.port, "proxy", settings.listen)

    def start_node(self, client: int) -> None:
        start_node(self.processes, self.project.node(client))

    def register(self) -> None:
        """Bring the SuperLink's and the proxy's keys up to date with the ledger."""
        self.keys.follow(Enrolment.of(self.ledger.entries))

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
                    "the SuperLink has a key of an unknown node; remove server/superlink.db and start again"
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
        """Start or continue the run, until it is finished."""
        with naming_a_full_disk(self.project.server, self._how_to_continue):
            return self._run(timeout)

    def _how_to_continue(self) -> str:
        # Before round 1 there is nothing to resume.
        command = "resume" if (self.project.run / "head.json").exists() else "up"
        return f"`holdfast federation {command} {self.project.path}` continues it"

    def _run(self, timeout: float | None) -> dict[str, Any]:
        result = self.project.run / "result.json"
        end = None if timeout is None else time.monotonic() + timeout
        stuck = 0  # runs in a row that ended without a reason and without a round: one may be chance
        while not result.exists():
            before = self._committed()
            status, why = self._one_run(end)
            if result.exists():
                break
            reason = self._reason()
            stuck = stuck + 1 if self._committed() == before else 0
            if reason is not None or stuck == 2:
                raise RunError(f"the run stopped ({reason or why or status}); {self._how_to_continue()}")
            self.say(f"the run stopped in round {self._committed() + 1} ({why or status}) and continues")
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
            self._restart_processes()
            self.refusals.add_to(self.ledger)
            self._report()
            # Asking costs Flower's command line a second of computing, so it is done seldom until there is a
            # result, and hardly ever while the ServerApp is there.
            since = time.monotonic() - asked
            if since > (1 if result.exists() else _SELDOM if since > 10 and self._serves() else 10):
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

    def _serves(self) -> bool:
        """Return whether there is a ServerApp."""
        for pid in self.processes.alive():
            try:
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
            except OSError:  # just gone
                continue
        return False

    def _restart_processes(self) -> None:
        """Restart processes that have died or hang. Raise an error if a process of the server dies repeatedly
        within a minute, or if the disk is full."""
        self.processes.end_frozen()
        self.contact.report(self.processes.running())
        for name in list(self.processes.started):
            process = self.processes.started[name]
            if process.poll() is None or time.monotonic() < self.not_before.get(name, 0.0):
                continue
            soon = time.monotonic() < self.not_before.get(name, -math.inf) + _SOON
            self.stops[name] = self.stops.get(name, 0) + 1 if soon else 1
            if client_of(name) is None and self.stops[name] > _MOST_STOPS:
                log = self.project.logs / f"{name}.log"
                raise RunError(
                    f"{name} stopped {_MOST_STOPS + 1} times in a row, with code {process.returncode};"
                    f" see {log}"
                )
            if shortage(self.project.server):
                raise RunError(f"{name} {self.processes.how_it_ended(name)}")
            # A process that dies repeatedly must not keep the machine busy with its starts.
            self.not_before[name] = time.monotonic() + 10
            self.say(f"{name} {self.processes.how_it_ended(name)} and is restarted")
            self._restart(name)

    def _restart(self, name: str) -> None:
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
        """Report new entries of the ledger, and bring bans and new keys to the SuperLink."""
        self.ledger.refresh()
        news = self.ledger.entries[self.reported :]
        self.reported = len(self.ledger.entries)
        for entry in news:
            if line := line_of(entry):
                self.say(line)
        self.rotated |= {entry.client for entry in news if entry.kind == "rotate"}
        self.outdated |= any(entry.kind in ("ban", "unban", "enrol", "rotate", "leave") for entry in news)
        if self.outdated:
            self._end_nodes()  # first: a node that can take its leave is free to come back at once
            try:
                self.register()
                self.outdated = False
            except RunError as error:  # the SuperLink is restarting; banned clients are sent nothing anyway
                self.say(f"SuperLink unreachable; will retry: {error}")
                return
            self._start_nodes()

    def _end_nodes(self) -> None:
        """End the nodes of this machine that are no longer admitted or have a new key."""
        admitted = Enrolment.of(self.ledger.entries).admitted
        for name in list(self.processes.started) if self.nodes else []:
            client = client_of(name)
            if client is not None and (client in self.rotated or client not in admitted):
                self.processes.end(name)
        self.rotated = set()

    def _start_nodes(self) -> None:
        """Start the nodes of this machine that are admitted and do not run."""
        for client in sorted(Enrolment.of(self.ledger.entries).admitted) if self.nodes else []:
            if f"node{client}" not in self.processes.started and (self.project.node(client) / "key").exists():
                self.start_node(client)

    def _committed(self) -> int:
        return Store(self.project.run).round() or 0

    def _reason(self) -> str | None:
        """Return the reason that the ServerApp gave for stopping; None if it was killed."""
        reason = (read_json(self.project.server / "stopped.json") or {}).get("reason")
        return None if reason is None else in_print(str(reason))[:500]
