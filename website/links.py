"""Links between pages of the repository, as they are in the site.

In the repository CONTRIBUTING.md lies above docs/. In the site it is a page beside the others, so
a link such as `../CONTRIBUTING.md` of a page in docs/, or `docs/config.md` of CONTRIBUTING.md, needs another
path. A link to a notebook leads to its page."""

from __future__ import annotations

import posixpath
import re

REPOSITORY_PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""Pages that lie outside docs/, with their place in the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def rewritten(markdown: str, page: str) -> str:
    """The text of a page with links that hold in the site. `page` is its place in the site."""
    in_repository = {place: name for name, place in REPOSITORY_PAGES.items()}
    source = in_repository.get(page, posixpath.join("docs", page))

    def relinked(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if target in REPOSITORY_PAGES:
            place = REPOSITORY_PAGES[target]
        elif source in REPOSITORY_PAGES and target.startswith("docs/"):
            place = target.removeprefix("docs/")
        elif target.endswith(".ipynb"):
            place = target.removeprefix("docs/").removesuffix(".ipynb") + ".md"
        else:
            return found[0]
        return found[1] + posixpath.relpath(place, posixpath.dirname(page) or ".") + found[3]

    return _LINK.sub(relinked, markdown)
