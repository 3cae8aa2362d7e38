"""What a page would load from other hosts is found; what a reader may follow is not."""

from __future__ import annotations

from tests.package import ROOT
from website.offline import loaded_from_outside


def test_scripts_styles_fonts_and_pictures_from_outside_are_found(tmp_path):
    (tmp_path / "good.html").write_text(
        '<a href="https://flower.ai">x</a><script src="assets/x.js"></script>'
        '<link rel="canonical" href="https://a.b/">'
    )
    (tmp_path / "bad.html").write_text(
        '<script defer src="https://c.example/x.js"></script><link rel="stylesheet" href="//c.example/x.css">'
        '<img alt="" src=https://cdn.example/x.png>'
    )
    (tmp_path / "bad.css").write_text('@font-face { src: url("https://fonts.example/x.woff2") }')
    found = loaded_from_outside(tmp_path)
    assert [line.partition(":")[0] for line in found] == ["bad.css", "bad.html", "bad.html", "bad.html"]


def test_the_search_of_pages_opened_as_files_has_its_own_script() -> None:
    """Without a script of this name the plugin `offline` would load one from another host."""
    script = "javascripts/iframe-worker.js"
    assert f"- {script}" in (ROOT / "mkdocs.yml").read_text()
    assert f'made["{script}"]' in (ROOT / "website" / "hooks.py").read_text()
    assert 'location.protocol === "file:"' in (ROOT / "website" / "iframe-worker.js").read_text()
