"""The app that `flwr run` takes: it names ours, which are installed with holdfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_app(folder: Path, settings: dict[str, Any]) -> Path:
    """Write the app that Flower sends to the nodes: one file that names ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(
        _APP + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    )
    return folder


_APP = """[project]
name = "holdfast-app"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "holdfast.deploy.server_app:app"
clientapp = "holdfast.deploy.client_app:app"
[tool.flwr.app.config]
"""
