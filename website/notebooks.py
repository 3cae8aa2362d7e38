"""Notebooks as pages of the site: they are run when the site is built, and shown with what they print and
draw."""

from __future__ import annotations

import asyncio
import base64
import os
import posixpath
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

AT_ONCE = 2
SECONDS = 300  # for one cell
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_all(notebooks: list[tuple[str, Path]]) -> dict[str, str | bytes]:
    """Run notebooks, each in its own empty folder. Returns their pages and pictures, by place in the
    site; `x.ipynb` becomes `x.md`. An exception in a notebook ends the build."""
    return asyncio.run(_run_all(notebooks))


async def _run_all(notebooks: list[tuple[str, Path]]) -> dict[str, str | bytes]:
    limit = asyncio.Semaphore(AT_ONCE)
    made = await asyncio.gather(*(_page(place, path, limit) for place, path in notebooks))
    return {place: content for pages in made for place, content in pages.items()}


async def _page(place: str, path: Path, limit: asyncio.Semaphore) -> dict[str, str | bytes]:
    notebook = nbformat.read(path, as_version=4)
    async with limit:
        # One thread each: notebooks run side by side, and their tensors are small.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook,
                timeout=SECONDS,
                kernel_name="python3",
                # A socket in the folder: no port is opened.
                config=Config({"ConnectionFileMixin": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
                resources={"metadata": {"path": folder}},
            )
            await client.async_execute()
    return to_markdown(notebook, place)


def to_markdown(notebook: Any, place: str) -> dict[str, str | bytes]:
    """A notebook that was run as a Markdown page, with its pictures as files beside it."""
    stem = place.removesuffix(".ipynb")
    made: dict[str, str | bytes] = {}
    lines: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            if len(lines) == 2:  # below the title
                name = posixpath.basename(place)
                lines += [
                    f'<p class="notebook">This page is a notebook. <a href="{name}" download>Download it</a>',
                    "",
                ]
                lines[-2] += " and run it cell by cell.</p>"
            continue
        lines += ["```python", cell.source, "```", ""]
        for output in cell.get("outputs", ()):
            lines += [*_output(output, stem, made), ""]
    return {f"{stem}.md": "\n".join(lines), **made}


def _output(output: Any, stem: str, made: dict[str, str | bytes]) -> list[str]:
    """What a cell printed or drew, in its richest form that needs no script."""
    if output.output_type == "stream":
        return _printed(output.text)
    data = output.get("data", {})
    for kind, suffix in PICTURES.items():
        if kind in data:
            place = f"{stem}-{len(made) + 1}.{suffix}"
            made[place] = base64.b64decode(data[kind]) if suffix == "png" else data[kind]
            return [f"![Picture drawn by the cell above]({posixpath.basename(place)})"]
    if "text/html" in data:
        plain = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.S)  # the site has its own
        inside = re.sub(r"\n\s*\n", "\n", plain.strip())  # a blank line would end the block
        return [f'<div class="notebook-output">{inside}</div>']
    return _printed(data.get("text/plain", ""))


def _printed(text: str) -> list[str]:
    """Printed text as a terminal shows it at the end: a line that was written over is left out."""
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in _CODES.sub("", text).split("\n")]
    return ["```{ .text .output }", *"\n".join(shown).rstrip().splitlines(), "```"] if any(shown) else []
