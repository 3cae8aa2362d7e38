"""Notebooks as pages."""

from __future__ import annotations

import base64
import json

import pytest

from tests.package import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat: pip install -e '.[docs]'")

from website.notebooks import to_markdown  # noqa: E402

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def ran(*outputs: dict) -> str:
    """The page of a notebook whose one code cell gave these outputs."""
    v4 = nbformat.v4
    code = v4.new_code_cell("1 + 1", outputs=[v4.new_output(**output) for output in outputs])
    return to_markdown(v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), code]), "notebooks/x.ipynb")


def test_code_and_printed_text_become_blocks():
    page = ran({"output_type": "stream", "name": "stdout", "text": "1 %\r50 %\rall done\nnext\n"})
    text = page["notebooks/x.md"]
    assert text.startswith("# Title\n") and 'href="x.ipynb" download' in text
    assert "```python\n1 + 1\n```" in text
    assert "all done\nnext\n```" in text and "50 %" not in text


def test_a_picture_becomes_a_file_and_a_table_stays_html():
    png = base64.b64encode(b"pixels").decode()
    page = ran(
        {"output_type": "display_data", "data": {"image/png": png, "text/plain": "<Figure>"}},
        {"output_type": "execute_result", "data": {"text/html": "<table>\n\n</table>", "text/plain": "t"}},
    )
    assert page["notebooks/x-1.png"] == b"pixels"
    assert "(x-1.png)" in page["notebooks/x.md"] and "<Figure>" not in page["notebooks/x.md"]
    assert '<div class="notebook-output"><table>\n</table></div>' in page["notebooks/x.md"]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_notebooks_are_stored_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_code_of_a_notebook_fits_its_page(path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    lines = [line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > 76] == []
