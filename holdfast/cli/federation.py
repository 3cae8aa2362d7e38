"""`holdfast federation`: a real federation on Flower, from its folder to its model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import AsJson, Plugins, app, print_json, print_line, to_stderr, to_stdout
from holdfast.cli.runs import diverged
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
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
    typer.Option(
        "--timeout", min=0, help="Seconds until it stops; `resume` continues it.", show_default=False
    ),
]
Metrics = Annotated[
    int | None,
    typer.Option(
        "--metrics",
        metavar="PORT",
        min=0,
        max=65535,
        help="Port of Prometheus metrics on 127.0.0.1; 0: none. Default: `metrics` in federation.toml.",
        show_default=False,
    ),
]
ServerOnly = Annotated[
    bool, typer.Option("--server-only", help="Start no nodes here: they are on other machines.")
]


def opened(folder: Path, metrics: int | None = None) -> Project:
    """Open a federation's folder. A port for metrics that is given counts for this command only."""
    need_flower()
    from holdfast.deploy.project import open_project

    project = open_project(folder)
    if metrics is None:
        return project
    return replace(project, settings=project.settings.model_copy(update={"metrics": metrics}))


def need_flower() -> None:
    """Check for Flower first: most of holdfast.deploy cannot be imported without it."""
    from holdfast import deploy

    deploy.need_flower()


@federation.command()
def init(
    folder: Folder,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of clients.", show_default=False)],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server as nodes reach it; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Public port of the server.")] = 8443,
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", help="Config of the experiment; default: FedCAP on the digits."),
    ] = None,
    plugin: Plugins = None,
    no_node_keys: Annotated[
        bool, typer.Option("--no-node-keys", help="Do not make private keys here: every node makes its own.")
    ] = False,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Write hardened units for server and nodes.")
    ] = False,
    container: Annotated[
        bool, typer.Option("--container", help="Write a folder from which an image is built.")
    ] = False,
) -> None:
    """Write the folder of a federation: config, certificates, node keys, and a README with the commands.

    \b
    Examples:
      holdfast federation init ward --clients 4
      holdfast federation init ward --clients 4 --no-node-keys
      holdfast federation init ward --clients 12 --host fl.example.org --experiment experiment.toml
      holdfast federation init ward --clients 4 --host fl.example.org --systemd --container




    """
    need_flower()
    from holdfast.deploy.project import init as write

    if experiment is not None and not experiment.exists():
        raise ConfigError(f"--experiment: there is no file {experiment}")
    project = write(
        folder,
        clients,
        host or [],
        port,
        experiment,
        plugin or [],
        node_keys=not no_node_keys,
        systemd=systemd,
        container=container,
    )
    console = to_stdout()
    print_line(
        console, f"a federation of {clients} clients in {folder}; ledger head {project.ledger().head[:16]}"
    )
    if no_node_keys:
        print_line(console, "on each node    holdfast federation key FOLDER --client CLIENT")
        print_line(console, f"then, here      holdfast federation enrol {folder} CLIENT --key FILE.pub")
    print_line(console, f"next            holdfast federation up {folder}")
    print_line(console, f"documentation   {folder / 'README.md'}")


@federation.command()
def up(
    folder: Folder,
    server_only: ServerOnly = False,
    timeout: Timeout = None,
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> int:
    """Start all processes on this machine, run the experiment, stop all processes. After a stop, the same
    command continues.

    \b
    Examples:
      holdfast federation up ward
      holdfast federation up ward --server-only
      holdfast federation up ward --metrics 9464





    """
    return _run(opened(folder, metrics), server_only, timeout, as_json)


@federation.command()
def resume(
    folder: Folder,
    server_only: ServerOnly = False,
    timeout: Timeout = None,
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> int:
    """Continue after any stop, from the last committed round.

    \b
    Example:
      holdfast federation resume ward




    """
    project = opened(folder, metrics)
    if not (project.run / "head.json").exists():
        raise ConfigError(
            f"{folder} has no run to continue yet; `holdfast federation up {folder}` starts one"
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
            "this run is finished already; nothing was started. For another run, move its folder away or init"
            " a new federation"
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's stop: as Ctrl-C
    say(f"starting {project.settings.name}; logs are in {project.logs}")
    try:
        spinning = console.status("starting") if console.is_terminal else nullcontext()
        with spinning as spinner, RunningFederation(project, say, nodes=not server_only) as running:
            if spinner is not None:
                spinner.update("running")
            settings = project.settings
            say(
                f"nodes join at {settings.address}; the run starts when all {many} have joined, or after"
                f" {settings.join:g} s"
            )
            running.run(timeout)
    except KeyboardInterrupt:
        say(f"interrupted; `holdfast federation resume {project.path}` continues it")
        raise typer.Exit(130) from None


@federation.command()
def node(
    folder: Annotated[
        Path, typer.Argument(metavar="NODE", help="The node's own folder.", show_default=False)
    ],
) -> int:
    """Run one client on its own machine until Ctrl-C. Its processes are restarted when they stop.

    \b
    Example:
      holdfast federation node nodes/3




    """
    need_flower()
    from holdfast.deploy.processes import begin_as_parent

    begin_as_parent(folder / "flower", folder / "logs")
    from holdfast.deploy.node_processes import keep_node

    console = to_stderr()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as in `up`
    try:
        keep_node(folder, lambda line: print_line(console, line))
    except KeyboardInterrupt:
        return 130
    return 0
