"""`holdfast federation`: a real federation on Flower, from its folder to its model."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import AsJson, Plugins, app, plain_text, print_json, print_line, to_stderr, to_stdout
from holdfast.cli.runs import diverged
from holdfast.core.errors import ConfigError, in_print, suggest

if TYPE_CHECKING:
    from holdfast.deploy.check import Check
    from holdfast.deploy.project import Project

federation = typer.Typer(
    name="federation",
    help="Run a real federation on Flower: TLS, keys, bans, resume.",
    no_args_is_help=True,
    add_completion=False,
    epilog="Start with `holdfast federation init DIR --clients 4`, then `holdfast federation up DIR`.",
)
app.add_typer(federation)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.", show_default=False)]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0, help="Seconds until it stops; `resume` goes on.", show_default=False),
]
ServerOnly = Annotated[
    bool, typer.Option("--server-only", help="Start no nodes here: they are on other machines.")
]


def opened(folder: Path) -> Project:
    need_flower()
    from holdfast.deploy.project import open_project

    return open_project(folder)


def need_flower() -> None:
    """First of all in a command: most of holdfast.deploy cannot even be imported without it."""
    from holdfast import deploy

    deploy.need_flower()


@federation.command()
def init(
    folder: Folder,
    clients: Annotated[int, typer.Option("--clients", min=1, help="How many.", show_default=False)],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server as nodes reach it; repeatable."),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Of the server's only open door.")
    ] = 8443,
    experiment: Annotated[
        Path | None, typer.Option("--experiment", help="What is trained; default: FedCAP on the digits.")
    ] = None,
    plugin: Plugins = None,
    no_node_keys: Annotated[
        bool, typer.Option("--no-node-keys", help="Make no private keys here: every node makes its own.")
    ] = False,
) -> None:
    """Write a ready federation: config, certificates, node keys, and a README with the operator's commands.

    \b
    Examples:
      holdfast federation init ward --clients 4
      holdfast federation init ward --clients 4 --no-node-keys
      holdfast federation init ward --clients 12 --host fl.example.org --experiment experiment.toml
    """
    need_flower()
    from holdfast.deploy.project import init as write

    if experiment is not None and not experiment.exists():
        raise ConfigError(f"--experiment: there is no file {experiment}")
    project = write(folder, clients, host or [], port, experiment, plugin or [], node_keys=not no_node_keys)
    console = to_stdout()
    print_line(
        console, f"a federation of {clients} clients in {folder}; ledger head {project.ledger().head[:16]}"
    )
    if no_node_keys:
        print_line(console, "on each node    holdfast federation key FOLDER --client CLIENT")
        print_line(console, f"then, here      holdfast federation enrol {folder} CLIENT --key FILE.pub")
    print_line(console, f"next            holdfast federation up {folder}")
    print_line(console, f"what is what    {folder / 'README.md'}")


@federation.command()
def up(
    folder: Folder, server_only: ServerOnly = False, timeout: Timeout = None, as_json: AsJson = False
) -> int:
    """Start everything on this machine, play the experiment, stop everything. The same command goes on after
    a stop.

    \b
    Examples:
      holdfast federation up ward
      holdfast federation up ward --server-only

    """
    return _run(opened(folder), server_only, timeout, as_json)


@federation.command()
def resume(
    folder: Folder, server_only: ServerOnly = False, timeout: Timeout = None, as_json: AsJson = False
) -> int:
    """Go on after a stop, whatever stopped it, from the last committed round.

    \b
    Example:
      holdfast federation resume ward
    """
    project = opened(folder)
    if not (project.run / "head.json").exists():
        raise ConfigError(
            f"{folder} has no run to continue yet; `holdfast federation up {folder}` begins one"
        )
    return _run(project, server_only, timeout, as_json)


def _run(project: Project, server_only: bool, timeout: float | None, as_json: bool) -> int:
    from holdfast.deploy.inspect import examined
    from holdfast.storage.store import Store

    examined(project).require()
    console = to_stderr()

    def say(line: str) -> None:
        print_line(console, line)

    if (project.run / "result.json").exists():
        say(
            "this run is finished already, and nothing is started; for another one move its folder away, or"
            " init a new federation"
        )
    else:
        _bring_up(project, server_only, timeout, say)
    result = Store(project.run).result()
    assert result is not None
    if as_json:
        print_json(result)
        return diverged(project.run)
    accuracy, out = result["final"].get("accuracy"), to_stdout()
    measured = "" if accuracy is None else f": accuracy {accuracy:.3f}"
    print_line(out, f"finished{measured}; ledger head {project.ledger().head}")
    print_line(out, f"page      holdfast report {project.run}")
    return diverged(project.run)


def _bring_up(project: Project, server_only: bool, timeout: float | None, say: Callable[[str], None]) -> None:
    from holdfast.deploy.enrolment import Enrolment
    from holdfast.deploy.up import RunningFederation

    project.check_experiment()
    console, many = to_stderr(), len(Enrolment.of(project.ledger().entries).admitted)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a service manager's way to say Ctrl-C: also then nothing is left behind
    say(f"starting {project.settings.name}; logs are in {project.logs}")
    try:
        spinning = console.status("starting") if console.is_terminal else nullcontext()
        with spinning as spinner, RunningFederation(project, say, nodes=not server_only) as running:
            if spinner is not None:
                spinner.update("playing")
            settings = project.settings
            say(
                f"up: nodes join at {settings.address}; the run begins when all {many} are here, or after"
                f" {settings.join:g} s"
            )
            running.run(timeout)
    except KeyboardInterrupt:
        say(f"interrupted; `holdfast federation resume {project.path}` goes on")
        raise typer.Exit(130) from None


@federation.command()
def node(
    folder: Annotated[
        Path, typer.Argument(metavar="NODE", help="The node's own folder.", show_default=False)
    ],
) -> int:
    """Run one client on its own machine, until Ctrl-C. It is started again when it stops.

    \b
    Example:
      holdfast federation node nodes/3
    """
    need_flower()
    from holdfast.deploy.node_processes import keep_node

    console = to_stderr()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as in `up`
    try:
        keep_node(folder, lambda line: print_line(console, line))
    except KeyboardInterrupt:
        return 130
    return 0


@federation.command("check-node")
def check_node(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.")],
    as_json: AsJson = False,
) -> int:
    """Everything that should be right on a node before round 1: key, experiment, its data against the schema
    and label map, privacy.

    \b
    Example:
      holdfast federation check-node nodes/3

    """
    need_flower()
    from holdfast.deploy.node_check import examine_node

    return show_checks(list(examine_node(folder)), as_json)


@federation.command()
def privacy(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.")],
    as_json: AsJson = False,
) -> None:
    """What this node has spent: epsilon at client level, over everything that ever left it, whatever the run.

    \b
    Examples:
      holdfast federation privacy nodes/3
      holdfast federation privacy nodes/3 --json
    """
    need_flower()
    from holdfast.deploy.privacy import Account
    from holdfast.deploy.project import open_node

    settings = open_node(folder)
    if settings.privacy is None:
        raise ConfigError(
            f"{folder}/node.toml has no [privacy]: what leaves this node is neither clipped nor noised"
        )
    spent = Account(folder / settings.state).spent(settings.privacy.delta)
    if as_json:
        print_json({name: value if math.isfinite(value) else None for name, value in spent.items()})
    else:
        print(f"{spent['epsilon/client']:.6g}")


@federation.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """How the federation stands: round, accuracy, bans, and the head of its ledger.

    \b
    Example:
      holdfast federation status ward
    """
    project = opened(folder)
    from holdfast.deploy.inspect import federation_status

    found = federation_status(project)
    if as_json:
        print_json(found)
        return
    console = to_stdout()
    state = "finished" if found["finished"] else "up" if found["up"] else "stopped"
    accuracy = "" if found["accuracy"] is None else f", accuracy {found['accuracy']:.3f}"
    paused = "".join(
        f"; client {client} does not answer and is paused until round {until}"
        for client, until in found["paused"].items()
    )
    for name, said in {
        "state": f"{state} ({found['processes']} processes)",
        "round": f"{found['round']}{accuracy}",
        "nodes join at": found["address"],
        "clients": f"{found['clients']}, {len(found['banned'])} banned{paused}",
        "ledger": f"{found['entries']} entries, head {found['head']}",
        "run": found["run"],
    }.items():
        print_line(console, f"{name:<15} {said}")


@federation.command()
def clients(folder: Folder, as_json: AsJson = False) -> None:
    """Who is there: last round, weight, score, strikes, bans and why.

    \b
    Example:
      holdfast federation clients ward
    """
    from rich.table import Table

    project = opened(folder)
    from holdfast.deploy.inspect import clients as everybody

    rows = everybody(project)
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else []:
        table.add_column(
            name, justify="left" if name in ("state", "key", "why") else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(plain_text(_words(value)) for value in row.values()))
    to_stdout().print(table)


def _words(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@federation.command()
def logs(
    folder: Folder,
    name: Annotated[
        str | None, typer.Argument(help="superlink, superexec, proxy, node3, run-...", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("--lines", min=1, help="How many of the last.")] = 40,
) -> None:
    """The last lines of a process's log; without a name, which logs there are.

    \b
    Examples:
      holdfast federation logs ward
      holdfast federation logs ward node3 --lines 100
    """
    project = opened(folder)
    from holdfast.core.reading import last_lines
    from holdfast.deploy.inspect import logs as files

    found = files(project)
    if name is None:
        for known, file in found.items():
            print(f"{in_print(known):<24} {file.stat().st_size:>10,} bytes")
        return
    if name not in found:
        raise ConfigError(f"there is no log '{name}'{suggest(name, found)}")
    print("\n".join(in_print(line) for line in last_lines(found[name], lines)))


@federation.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .safetensors.", show_default=False)],
    client: Annotated[
        int | None, typer.Option("--client", help="Whose model; default: the global one.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="global, customised or personal.", show_default=False)
    ] = None,
    node_folder: Annotated[
        Path | None, typer.Option("--node", help="The node's folder: a personal model is only there.")
    ] = None,
) -> None:
    """Write a model as safetensors: the global one, or a client's. A personal model never left its node:
    export it there with --node.

    \b
    Examples:
      holdfast federation export ward model.safetensors
      holdfast federation export ward mine.safetensors --client 3 --model customised
      holdfast federation export ward mine.safetensors --node nodes/3

    """
    need_flower()
    from holdfast.deploy.export import export_model

    written = export_model(opened(folder) if node_folder is None else None, out, client, model, node_folder)
    print_line(to_stdout(), written)


@federation.command()
def verify(
    folder: Folder,
    head: Annotated[
        str | None,
        typer.Option(
            "--head", metavar="HEX|FILE", help="A head that was written down elsewhere.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check the ledger against all that speaks of it: its own chain, the run, the SHA-256 of the model, the
    signed head, and --head.

    HEX is a head as `status` prints it, FILE a signed one, such as the ledger.head that every node keeps.

    \b
    Examples:
      holdfast federation verify ward
      holdfast federation verify ward --head nodes/3/state/ledger.head

    """
    project = opened(folder)
    from holdfast.deploy.inspect import examined

    return show_checks(list(examined(project).examine(head)), as_json)


@federation.command("accept-ledger")
def accept_ledger(
    folder: Folder,
    reason: Annotated[
        str, typer.Option("--reason", help="Written into the ledger, for good.", show_default=False)
    ],
) -> None:
    """Go on with a ledger that `verify` refuses, when its newest copy is lost: what is gone, and why, becomes
    an entry of it.

    \b
    Example:
      holdfast federation accept-ledger ward --reason "the disk failed; this is the backup of Monday"

    """
    project = opened(folder)
    from holdfast.deploy.enrolment import Enrolment
    from holdfast.deploy.ledger_keeping import accept_ledger as accept
    from holdfast.deploy.processes import Processes

    if Processes(project.server / "flower", project.logs).alive():
        raise ConfigError(f"{folder} is up; stop it first")
    ledger = accept(project.ledger_file, project.run, reason)
    project.share_server_key()
    who = Enrolment.of(ledger.entries)
    here = (
        f"{len(who.members)} clients are enrolled, {len(who.banned)} of them banned; enrol and ban again what"
        " is missing"
    )
    print_line(to_stdout(), f"accepted; {here}; ledger head {ledger.head}")


@federation.command()
def doctor(folder: Folder, as_json: AsJson = False) -> int:
    """Everything that should be right before round 1: versions, clock, ports, certificates, keys, config,
    ledger.

    \b
    Example:
      holdfast federation doctor ward

    """
    project = opened(folder)
    from holdfast.deploy.inspect import examine

    return show_checks(list(examine(project)), as_json)


def show_checks(checks: list[Check], as_json: bool) -> int:
    if as_json:
        print_json([{"what": c.what, "good": c.good, "said": c.said} for c in checks])
    else:
        for check in checks:
            print_line(to_stdout(), f"{'ok ' if check.good else 'BAD'}  {check.what:<12} {check.said}")
    return 0 if all(check.good for check in checks) else 1
