"""A node whose processes run changed code."""

from __future__ import annotations

import os

from holdfast.deploy.processes import Processes
from holdfast.deploy.project import Project


def corrupt(project: Project, client: int, code: str) -> dict[str, str]:
    """A sitecustomize for all processes of one node, with which `code` may replace what it likes; gives their
    environment. `here` is a folder of its own, and `lie(change)` has change(reply, request) replace what the
    ClientApp sends."""
    folder = project.path / f"cheat{client}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib\nimport numpy as np\nimport holdfast.deploy.messaging as post\nfrom flwr.app"
        f" import Array, ConfigRecord\nhere, server = pathlib.Path({str(folder)!r}),"
        f" pathlib.Path({str(project.server)!r})\nhonest = post.answer\ndef lie(change):\n    post.answer ="
        " lambda content, message: change(honest(content, message), message)\ndef asked(message):\n   "
        " return message.content['header']['task'], message.content['header']['round']\n" + code
    )
    path = Processes(project.server / "flower", project.logs).environment()["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join([str(folder), path])}
