"""Writes models of a federation as safetensors files: the server has the global and the customised ones, a
node its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.deploy.project import Project, open_node
from holdfast.storage.store import read_tensors


def export_model(
    project: Project | None, out: Path, client: int | None, model: str | None, node: Path | None
) -> str:
    """Write the file and return a line that says what was written."""
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} must end in .safetensors")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}")
    if node is not None:
        return _from_node(node, out)
    assert project is not None
    from safetensors.torch import save_file

    from holdfast.results.run import Run

    if not (project.run / "head.json").exists():
        raise ConfigError(f"{project.path} has no model yet: no round is committed")
    run = Run(project.run)
    kind = model or ("global" if client is None else None)
    if (kind or run.config.parts().method.deploys) == "personal":
        raise ConfigError("model: a personal model never left its node; export it there, with --node NODE")
    module = run.model(client, kind)
    save_file({name: value.contiguous() for name, value in module.state_dict().items()}, out)
    return (
        f"{out}: {'the global model' if client is None else f'the model of client {client}'} after round"
        f" {run.round}"
    )


def _from_node(node: Path, out: Path) -> str:
    settings = open_node(node)
    found = sorted(
        (node / settings.state).glob(f"*/{settings.client}/model.safetensors"),
        key=lambda file: file.stat().st_mtime,
    )
    if not found:
        raise ConfigError(f"{node} has no model yet: it is kept whenever the node is evaluated")
    read_tensors(found[-1])  # a damaged file is not exported
    shutil.copyfile(found[-1], out)
    return f"{out}: the model that client {settings.client} uses, of run {found[-1].parent.parent.name}"
