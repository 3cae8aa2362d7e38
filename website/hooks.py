"""What MkDocs calls while it builds the site (`hooks` in mkdocs.yml).

Beside the pages in docs/ the site has pages that are generated here: the reference, from the code; the
notebooks, which are run; and the pages of the repository that lie outside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from website import reference
from website.links import REPOSITORY_PAGES, rewritten
from website.notebooks import run_all
from website.offline import loaded_from_outside

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Put the reference into the navigation, and pages of docs/ that it does not name."""
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    sections["Reference"].extend(reference.navigation())
    named = set(_paths(config.nav))
    for page in sorted(Path(config.docs_dir).rglob("*.md")):
        path = page.relative_to(config.docs_dir).as_posix()
        if path not in named:
            sections["Guides"].append(path)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    made: dict[str, str | bytes] = dict(reference.pages())
    made |= {page: (ROOT / name).read_text() for name, page in REPOSITORY_PAGES.items()}
    made["stylesheets/site.css"] = (ROOT / "website" / "site.css").read_text()
    made["javascripts/iframe-worker.js"] = (ROOT / "website" / "iframe-worker.js").read_text()
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    made |= run_all([(file.src_uri, Path(file.abs_src_path)) for file in notebooks])
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside docs/ lead to their pages of the site."""
    return rewritten(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Fail if a page would load something from outside."""
    if found := loaded_from_outside(Path(config.site_dir)):
        raise PluginError("the site must load without a network, but loads:\n" + "\n".join(found))


def _paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [path for entry in entries for path in _paths(entry)]
