"""SVG elements as escaped text. Colours come from the page's style, so charts follow light and dark."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped attributes and children. `class_` and `aria_label` become `class` and
    `aria-label`; attributes that are None are left out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{given}>{join(children)}</{tag}>" if children else f"<{tag}{given}/>")


def join(parts: Iterable[object]) -> Markup:
    """The parts one after the other; those that are not markup are escaped."""
    return Markup("".join(map(escape, parts)))


def chart(kind: str, width: float | str, height: float | str, label: str, parts: Iterable[object]) -> Markup:
    """A whole chart; `label` is what a screen reader says."""
    return element(
        "svg",
        *parts,
        class_=kind,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
    )


def fitted(width: float, height: float, label: str, parts: Iterable[object]) -> Markup:
    """A chart that is as wide as its content: it never grows, and on a narrow screen it shrinks only as far
    as its text can be read."""
    return element(
        "svg",
        *parts,
        class_="chart",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        style=f"max-width:{width:.0f}px;min-width:{min(760.0, 0.72 * width):.0f}px",
        role="img",
        aria_label=label,
    )


def group(kind: str, *children: object, **attributes: object) -> Markup:
    return element("g", *children, class_=kind, **attributes)


def path(kind: str, d: str, *children: object, **attributes: object) -> Markup:
    return element("path", *children, class_=kind, d=d, **attributes)


def text(kind: str, x: float | str, y: float | str, words: object) -> Markup:
    """Words at a place; `x` and `y` are rounded to a tenth."""
    return element("text", words, class_=kind, x=_number(x), y=_number(y))


def title(words: object) -> Markup:
    """What is shown when the pointer is on the element."""
    return element("title", words)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
