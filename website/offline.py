"""The built site loads nothing from outside: no script, style, font or picture. Links that a reader follows
may lead anywhere."""

from __future__ import annotations

import re
from pathlib import Path

_OUTSIDE = r"(?:https?:)?//"
_LOADED = re.compile(
    rf"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?{_OUTSIDE}[^>\s]*"""
    rf"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*?\bhref=["']?{_OUTSIDE}[^>\s]*"""
    rf"""|@import\s+(?:url\()?["']?{_OUTSIDE}[^;)]*|\burl\(["']?{_OUTSIDE}[^)]*""",
    re.I,
)


def loaded_from_outside(site: Path) -> list[str]:
    """What the pages and styles of a built site would load from other hosts: file and tag."""
    files = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css", ".svg")]
    return [
        f"{path.relative_to(site)}: {found[0][:120]}"
        for path in files
        for found in _LOADED.finditer(path.read_text(errors="replace"))
    ]
