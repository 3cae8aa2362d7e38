"""A parser that checks that a page's elements are closed in order."""

from __future__ import annotations

from html.parser import HTMLParser


class Balanced(HTMLParser):
    """Every element is closed in order; collects what stands on the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")
        ]
        if tag not in ("meta", "wbr", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
