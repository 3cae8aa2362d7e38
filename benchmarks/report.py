"""How large the report of a large sweep is, how long it takes to write, and how long a browser takes to open
it.

    python benchmarks/report.py                    # 48 cells, 100 rounds, 20 clients: about two minutes of
                                                   training the first time
    python benchmarks/report.py --screenshots      # and the pictures of docs/reports.md and of the README
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.browser import Browser
from holdfast.core.files import write_atomically
from holdfast.demo import runner as demo
from holdfast.experiment.manifest import run_folders
from holdfast.experiment.runner import RunCallbacks
from holdfast.report.page import write_page
from holdfast.sweeps.grid import configs
from holdfast.sweeps.session import start

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
SWEEP: dict[str, Any] = {
    "data": {"clients": 20, "partition": {"name": "dirichlet", "beta": 0.3, "samples_per_client": 60}},
    "train": {"rounds": 100, "local_steps": 5, "lr": 0.05},
    "evaluate": {"every": 2},
    "attack": {"fraction": 0.3},
    "engine": {"plan": "vmap", "threads": 1, "workers": 1},
    "sweep": {
        "method.name": ["fedavg", "ditto", "fedas", "fedcap"],
        "attack.name": ["none", "lie", "ipm", "sign-flip"],
        "seed": [0, 1, 2],
    },
}
PICTURES = {  # light or dark, how wide, from where to where
    "report-light": ("light", 1180, "header", "#s1"),
    "report-dark": ("dark", 1180, "#s2", "#s2"),
    "report-phone": ("light", 400, "header", "#s1"),
}
# until everything is laid out and painted, not only read
PAINTED = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done([
    performance.getEntriesByType('navigation')[0].loadEventEnd, performance.now()]))))"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/report-benchmark"),
        help="directory of the sweep; it runs if it does not exist",
    )
    parser.add_argument("--screenshots", action="store_true", help="draw docs/img from it, and from the demo")
    given = parser.parse_args()
    if not run_folders(given.folder):
        start(configs(SWEEP), given.folder, RunCallbacks(say=print))
    before = time.perf_counter()
    page = write_page(given.folder)
    took = time.perf_counter() - before
    others = sorted(page.with_suffix("").glob("*.html"))
    largest = max(others, key=lambda one: one.stat().st_size)
    sizes = [file.stat().st_size / 1e6 for file in (page, largest)]
    print(f"written in {took:.1f} s: {sizes[0]:.2f} MB, and {len(others)} pages of up to {sizes[1]:.2f} MB")
    with Browser() as browser:
        for name, file in (("summary", page), ("largest run", largest)):
            seen = []
            for _ in range(5):
                browser.open(file)
                seen.append(browser.run(PAINTED))
            loaded, painted = (statistics.median(column) for column in zip(*seen, strict=True))
            print(f"{name}: loaded after {loaded:.0f} ms, painted after {painted:.0f} ms (median of 5)")
        if given.screenshots:
            draw(browser, page, PICTURES)
            draw(
                browser,
                demo_page(given.folder.with_name(given.folder.name + "-demo")),
                {"demo": ("light", 1180, "header", "#s2")},
            )


def demo_page(folder: Path) -> Path:
    """Return the page of `holdfast demo`, for the README; the demo runs if it does not exist."""
    return (
        write_page(folder, title=demo.TITLE, alone=True)
        if run_folders(folder)
        else demo.run_demo(folder, RunCallbacks(say=print))
    )


def draw(browser: Browser, page: Path, pictures: dict[str, tuple[str, int, str, str]]) -> None:
    for name, (scheme, width, first, last) in pictures.items():
        browser.resize(width, 900, 1.5 if width > 500 else 2)
        browser.dress(scheme)
        browser.open(page)
        ends = ((first, "top"), (last, "bottom"))
        top, bottom = (
            browser.run(f"document.querySelector('{one}').getBoundingClientRect().{side}")
            for one, side in ends
        )
        picture = Image.open(
            io.BytesIO(browser.picture((0, max(0, top - 16), width, bottom - top + 32)))
        ).convert("RGB")
        out = io.BytesIO()
        picture.quantize(128).save(out, format="PNG", optimize=True)
        write_atomically(IMAGES / f"{name}.png", out.getvalue())
        print(f"docs/img/{name}.png  {len(out.getvalue()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
