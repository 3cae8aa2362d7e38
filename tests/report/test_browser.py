"""Pages as a browser shows them, driven as a person would: by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.browser import MISSING, VARIABLE, Browser, find_browser
from holdfast.core.errors import ConfigError
from holdfast.report.page import write_page
from tests.report.conftest import sweep

needs_browser = pytest.mark.skipif(find_browser() is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        one = Browser()
    except ConfigError as error:  # there, but not able to run: no sandbox, no shared memory
        pytest.skip(str(error))
    with one:
        yield one


def focused(browser: Browser) -> str:
    """What has the focus, in a word or two."""
    return browser.run(
        "(e => e.className.baseVal ?? (e.className || e.textContent.trim()))(document.activeElement)"
    )


@needs_browser
def test_a_page_opens_without_complaint_and_shows_its_values(browser: Browser, duel: Path) -> None:
    browser.open(write_page(duel))
    assert browser.errors == []
    scores: list[str] = browser.run(
        "[...document.querySelectorAll('svg.scores .score')].map(t => t.textContent)"
    )
    assert (
        len(scores) == 8
        and all("%" in score for score in scores)
        and sum("★" in score for score in scores) >= 3
    )
    places = (
        "[...document.querySelectorAll('svg.scores .score')].every(t => t.getBoundingClientRect().width > 10)"
    )
    assert browser.run(places)  # shown, not only there
    browser.run("console.error('so a complaint is heard')")
    browser.run("0")
    assert browser.errors == ["so a complaint is heard"]


def test_without_a_browser_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no-such-browser")
    assert find_browser() is None
    with pytest.raises(ConfigError, match="make browser"):
        Browser()


@needs_browser
@pytest.mark.slow
def test_the_keyboard_reaches_everything(browser: Browser, duel: Path) -> None:
    browser.open(write_page(duel))
    browser.press("Tab")
    assert focused(browser) == "skip"
    assert browser.run("document.activeElement.getBoundingClientRect().top >= 0")  # it comes into view
    seen = []
    for _ in range(60):
        browser.press("Tab")
        seen.append(focused(browser))
        if seen[-1] == "key" and seen.count("key") == 2:
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert browser.run(outline) == "solid"
            before = browser.run("document.activeElement.getAttribute('aria-pressed')")
            browser.press(" ")
            assert (
                before == "true"
                and browser.run("document.activeElement.getAttribute('aria-pressed')") == "false"
            )
            assert browser.run("document.querySelectorAll('svg [data-line=\"1\"].off').length") > 3
        if seen[-1] == "chart":
            break
    assert "Accuracy under attack" in seen and seen.count("key") == 2 and seen[-1] == "chart"
    browser.press("Home")
    assert browser.run("document.getElementById('tip').textContent").startswith("round 1")
    browser.press("ArrowRight")
    told = browser.run("document.getElementById('tip').textContent")
    assert (
        told.startswith("round 2") and "fedavg" in told and "fedcap" not in told
    )  # that one was put out above
    assert browser.errors == []


@needs_browser
@pytest.mark.slow
def test_a_click_on_a_head_sorts(browser: Browser, duel: Path) -> None:
    browser.open(write_page(duel))
    column = """[...document.querySelector('table.sortable').tBodies[0].rows].map(r => Number(r.cells[1].dataset.value))"""  # noqa: E501
    before = browser.run(column)
    browser.run("document.querySelectorAll('table.sortable .sort')[1].click()")
    assert browser.run(column) == sorted(before, reverse=True)
    browser.run("document.querySelectorAll('table.sortable .sort')[1].click()")
    assert browser.run(column) == sorted(before)
    assert browser.run("document.querySelector('table.sortable th[aria-sort]').textContent") == "accuracy"


@needs_browser
@pytest.mark.slow
def test_of_many_lines_others_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    axes = {"train.lr": [0.01 * i for i in range(1, 11)]}
    browser.open(write_page(sweep(tmp_path / "s", train={"rounds": 2, "local_epochs": 1}, sweep=axes)))
    muted = "document.querySelectorAll('[data-chart=\"accuracy/0\"] .muted').length"
    assert browser.run(muted) == 2
    browser.run("document.querySelector('.key[aria-pressed=false]').click()")
    assert browser.run(muted) == 1
    browser.run("document.querySelector('.key[data-all=true]').click()")
    assert browser.run(muted) == 0
    labels = (
        "[...document.querySelectorAll('[data-chart=\"accuracy/0\"] .label')].map(t =>"
        " Number(t.getAttribute('y')))"
    )
    places = sorted(browser.run(labels))
    assert len(places) == 10 and min(b - a for a, b in zip(places, places[1:], strict=False)) >= 13.8
    browser.run("document.querySelector('.key[data-all=false]').click()")
    assert browser.run(muted) == 10 and browser.errors == []


@needs_browser
@pytest.mark.slow
def test_pages_of_runs_are_linked_both_ways(
    browser: Browser, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.report.page.MOST_TOGETHER", 5)
    browser.open(write_page(grid, tmp_path / "report.html"))
    link = browser.run("document.querySelector('table a').href")
    browser.open(Path(link.removeprefix("file://").replace("%3D", "=")))
    assert browser.errors == [] and browser.run("document.querySelector('.back a').href").endswith(
        "/report.html"
    )


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 720, 400])
@pytest.mark.parametrize(("scheme", "media"), [("light", ""), ("dark", ""), ("dark", "print")])
def test_no_page_is_wider_than_its_window(
    browser: Browser, duel: Path, width: int, scheme: str, media: str
) -> None:
    page = write_page(duel)
    browser.resize(width, 900)
    browser.dress(scheme, media)
    try:
        browser.open(page)
        assert browser.errors == []
        if media != "print" or width > 700:  # a telephone does not print
            assert browser.run("document.documentElement.scrollWidth") <= width
        dark = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
        assert dark == (scheme == "dark" and media == "")  # paper is white whatever the screen is
        assert contrast(browser) >= 4.5
    finally:
        browser.resize(1280, 900)
        browser.dress()


def contrast(browser: Browser) -> float:
    """The lowest contrast of a text in the heat map with the cell behind it, as WCAG counts it."""
    script = """[...document.querySelectorAll('svg.scores [role=cell]')].map(g => [
        getComputedStyle(g.querySelector('text')).fill, getComputedStyle(g.querySelector('.cell')).fill,
        getComputedStyle(g.querySelector('.heat')).fill, Number(g.querySelector('.heat').getAttribute('fill-opacity'))])"""  # noqa: E501
    found = []
    for ink, record, heat, share in browser.run(script):
        behind = [
            share * over + (1 - share) * under for over, under in zip(rgb(heat), rgb(record), strict=True)
        ]
        light, dark = sorted((luminance(rgb(ink)), luminance(behind)), reverse=True)
        found.append((light + 0.05) / (dark + 0.05))
    return min(found)


def rgb(text: str) -> list[float]:
    return [float(part) for part in text[4:-1].split(",")]


def luminance(colour: list[float]) -> float:
    red, green, blue = (
        (v / 255 / 12.92) if v <= 10.3 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@needs_browser
@pytest.mark.slow
def test_the_slider_of_a_run_changes_its_matrix(browser: Browser, tmp_path: Path) -> None:
    """The customisation matrix of the section about the inside of a run."""
    page = write_page(
        sweep(tmp_path / "s", method={"name": "fedcap"}, attack={"name": "ipm", "fraction": 0.25})
    )
    browser.open(page)
    slider = "document.querySelector('input[type=range]')"
    if not browser.run(f"{slider} !== null"):
        pytest.skip("the page has no slider yet: holdfast/report/run_details.py is not there")
    matrix = f"{slider}.closest('section').innerHTML.replace(/<input[^>]*>/, '')"
    before = browser.run(matrix)
    browser.run(f"{slider}.focus()")
    browser.press("Home")
    assert browser.run(matrix) != before and browser.errors == []


@needs_browser
def test_tables_fit_a_screen_and_a_telephone_shows_whole_axes(browser: Browser, duel: Path) -> None:
    page = write_page(duel)
    try:
        browser.resize(1400, 900)
        browser.open(page)
        assert browser.run(
            "[...document.querySelectorAll('table')].filter(t => t.offsetParent).every(t =>"
            " t.parentNode.scrollWidth <= t.parentNode.clientWidth)"
        )
        browser.resize(400, 900)
        browser.open(page)
        ends = "[...document.querySelectorAll('.rows.chart .axis text')].map(t => t.getBoundingClientRect())"
        left, right = (browser.run(f"{ends}.map(r => r.{side})") for side in ("left", "right"))
        assert min(left) >= 0 and max(right) <= 400 and max(right) - min(left) > 280
        # a name breaks between its words or after a joint, never inside a word
        lines = """[...document.querySelectorAll('tbody th')].filter(t => t.offsetParent).every(cell => {
            const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
            const range = document.createRange();
            for (let node; (node = walk.nextNode());)
                for (const word of node.textContent.matchAll(/[A-Za-z0-9.]+/g)) {
                    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
                    const tops = [...range.getClientRects()].map(r => Math.round(r.top));
                    if (new Set(tops).size > 1) return false;
                }
            return true; })"""
        assert browser.run(lines)
        assert browser.run(
            "document.querySelector('.scroll.more') !== null"
        )  # its edge shows that it goes on
    finally:
        browser.resize(1280, 900)


@needs_browser
def test_long_names_keep_off_the_bars_and_labels_stay_inside(browser: Browser, tmp_path: Path) -> None:
    attack = {"name": "gaussian", "fraction": 0.25}
    axes = {"method.name": ["fedavg", "local"], "attack": ["none", attack]}
    browser.open(write_page(sweep(tmp_path / "s", train={"rounds": 2, "local_epochs": 1}, sweep=axes)))
    apart = (
        "(s => Math.min(...[...s.querySelectorAll('.bar')].map(r => r.getBoundingClientRect().left)) "
        "- Math.max(...[...s.querySelectorAll('.name')].map(t => t.getBoundingClientRect().right)))"
    )
    assert browser.run(f"Math.min(...[...document.querySelectorAll('.rows.bars')].map({apart}))") > 0
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    over = "t => t.getBoundingClientRect().right - t.closest('svg').getBoundingClientRect().right"
    piles = "[...document.querySelectorAll('path.stack')].map(p => p.parentNode.querySelector('.label'))"
    assert browser.run(f"{piles}.length") > 0 and browser.run(f"Math.max(...{piles}.map({over}))") <= 0
