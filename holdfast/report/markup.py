"""HTML from Jinja2 templates with autoescape: text that comes from a run never becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.report.drawing import Drawing

_REPORT = "holdfast.report"
_BREAK = "<wbr>"
_JOINTS = re.compile(r"(?<=[=,/_:;(\[{])(?=[^\s=,/_:;]{4})")


@dataclass(frozen=True)
class Section:
    """One section of a page: its heading and what is below it."""

    title: str
    body: Markup
    figures: Sequence[Drawing] = ()
    """Its charts as figures for papers."""


def fill(template: str, /, package: str = _REPORT, **values: Any) -> Markup:
    """Render a template of the folder `templates` in a package. All can import those of the report."""
    return Markup(_environment(package).get_template(template).render(values))


def whole_page(template: str, /, package: str = _REPORT, **values: Any) -> str:
    """Render a whole page."""
    return str(fill(template, package, **values))


@cache
def _environment(package: str) -> Environment:
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, _REPORT))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["resource"] = resource
    made.filters["breakable"] = breakable
    return made


def breakable(text: str) -> Markup:
    """The text with places after its joints where a narrow screen may break it, so that it breaks no word.
    A short end stays with its joint: 'seed=0' is never broken."""
    return Markup(_BREAK).join(escape(part) for part in _JOINTS.split(text))


def resource(name: str, package: str = _REPORT) -> Markup:
    """A style sheet or script of a package, to be put into a page as it is."""
    return Markup((files(package) / name).read_text())


def script_json(value: Any) -> Markup:
    """JSON for a script element. `<` becomes an escape sequence, so no text can end the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def attribute_json(value: Any) -> Markup:
    """JSON for an attribute between single quotes, in which double quotes need no escape."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;"))
