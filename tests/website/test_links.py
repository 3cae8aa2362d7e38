"""Links hold in the repository and in the site."""

from __future__ import annotations

import re

import pytest

from tests.package import ROOT
from website.links import REPOSITORY_PAGES, rewritten

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
PAGES = sorted(
    [ROOT / name for name in ("README.md", *REPOSITORY_PAGES)] + list((ROOT / "docs").rglob("*.md"))
)


def test_a_page_of_docs_links_to_pages_above_it():
    text = "[how](../CONTRIBUTING.md#style) and [what](config.md)"
    assert rewritten(text, "design.md") == "[how](project/contributing.md#style) and [what](config.md)"
    assert (
        rewritten("[how](../../CONTRIBUTING.md)", "tutorials/deploy.md")
        == "[how](../project/contributing.md)"
    )


def test_a_page_above_docs_links_to_pages_of_docs():
    text = "[design](docs/design.md#plans), [changes](CHANGELOG.md), [out](https://example.org/docs/x.md)"
    expected = "[design](../design.md#plans), [changes](changelog.md), [out](https://example.org/docs/x.md)"
    assert rewritten(text, "project/contributing.md") == expected


def test_a_link_to_a_notebook_leads_to_its_page():
    assert rewritten("[see](notebooks/compare.ipynb)", "index.md") == "[see](notebooks/compare.md)"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_files_that_a_page_links_to_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in _LINK.findall(text):
        assert (page.parent / target).exists(), target
