"""The page stands alone, tells what was measured, and lets no text of a run become markup."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from holdfast.cli import main
from holdfast.report.axis import nice_ticks, round_ticks, shorten, spread_out
from holdfast.report.charts import Series, curves, line_class, thin_out
from holdfast.report.page import render, write_page
from holdfast.report.read_runs import Dot, read_records
from holdfast.report.rounds import thinned
from holdfast.report.verdict import verdict
from holdfast.storage.store import Store
from tests.report.balanced_html import Balanced
from tests.report.conftest import sweep


def test_the_page_is_whole_small_and_alone(grid: Path) -> None:
    page = write_page(grid)
    text = page.read_text()
    seen = Balanced(text)
    assert page == grid / "report.html" and len(text) < 500_000
    assert all(link.startswith("#") for link in seen.links) and seen.tags["script"] == 2
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "@media print" in text


def test_it_shows_curves_clients_partition_protocol_and_command(grid: Path) -> None:
    text = render(read_records(grid))
    assert text.count('class="line"') >= 6 and 'data-chart="loss/0"' in text
    assert text.count('class="client"') == 3 * 2 * 4  # methods, seeds, clients
    assert re.search(r"client 3, class \d: \d+ samples", text)
    assert "the global model, one for all" in text and "each client&#39;s personal model" in text
    assert "holdfast run config.toml --plan loop --set engine.threads=1 --workers 1" in text
    assert "accuracy/<wbr>pooled" in text


def test_it_shows_the_metrics_that_were_asked_for(single: Path, tmp_path: Path) -> None:
    text = render(read_records(sweep(tmp_path / "s", evaluate={"metrics": ["balanced_accuracy", "auc"]})))
    Balanced(text)
    assert (
        'data-chart="balanced_accuracy/0"' in text
        and 'data-chart="auc/0"' in text
        and 'data-chart="macro_f1' not in text
    )
    for clip in re.findall(r"url\(#([^)]*)\)", text):
        assert " " not in clip and f'id="{clip}"' in text
    assert "AUC</th>" in text and "auc/<wbr>worst10" in text and '"auc/0":[{' in text
    assert "AUC" not in render(read_records(single))


def test_heat_map_counts_every_training_sample_once(single: Path) -> None:
    text = render(read_records(single))
    counts = [int(n) for n in re.findall(r"client \d+, class \d: (\d+) samples", text)]
    assert sum(counts) == sum(int(n) for n in re.findall(r'class="count[^>]*>(\d+)<', text)) > 0


def test_text_of_a_run_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "</script><script>alert(1)</script>"
    monkeypatch.chdir(tmp_path)
    for name in (evil, "<img src=x>"):  # data.dir must exist
        Path(name).mkdir(parents=True)
    folder = sweep(tmp_path / "s", sweep={"data.dir": [evil, "<img src=x>"]})
    text = render(read_records(folder), title=evil)
    seen = Balanced(text)
    assert seen.tags["script"] == 2 and "img" not in seen.tags
    assert evil not in text and "alert(1)" in text


def test_an_unfinished_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Store.commit

    def stop(self: Store, round: int) -> None:
        plain(self, round)
        if round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path / "s")
    text = render(read_records(tmp_path / "s"))
    assert "1 of the runs has not finished" in text and "fedavg" in text


def test_data_that_is_gone_is_no_disaster(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.core.errors import DataError

    def gone(*args: object) -> None:
        raise DataError("no folder 'digits'")

    monkeypatch.setattr("holdfast.report.class_counts.build_federation", gone)
    assert "The data cannot be read: no folder" in render(read_records(single))


def test_the_command_writes_where_it_is_told(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(single), "--out", str(tmp_path / "x.html")])
    assert (
        capsys.readouterr().out.strip() == str(tmp_path / "x.html")
        and (tmp_path / "x.html").stat().st_size > 10_000
    )
    with pytest.raises(SystemExit):
        main(["report", str(single), "--markdown"])
    assert capsys.readouterr().out.startswith("|  | accuracy |")


def test_the_verdict_says_when_the_order_may_be_chance(single: Path, grid: Path, tmp_path: Path) -> None:
    from holdfast.report.read_runs import by_setting, one_each

    assert "points more" not in verdict(by_setting(read_records(single)))[1]
    assert "There is one seed each" in verdict(one_each(read_records(grid)))[1]
    lines = by_setting(read_records(grid))
    best = max(lines, key=lambda line: line.mean("accuracy") or 0)
    assert verdict(lines)[0] == best.label


def test_ticks_enclose_and_are_round() -> None:
    assert nice_ticks(0.713, 0.98) == pytest.approx([0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0])
    assert nice_ticks(0, 2.3)[0] == 0 and nice_ticks(0, 2.3)[-1] >= 2.3
    assert nice_ticks(1.0, 1.0)[0] < 1 < nice_ticks(1.0, 1.0)[-1]
    assert (
        round_ticks(1, 30) == [1, 5, 10, 15, 20, 25, 30]
        and round_ticks(1, 1) == [1]
        and round_ticks(1, 2) == [1, 2]
    )


def test_labels_do_not_overlap() -> None:
    placed = spread_out([50, 51, 52, 10], 14, 0, 100)
    ordered = sorted(placed)
    assert (
        all(b - a >= 14 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
        and 0 <= ordered[0]
        and ordered[-1] <= 100
    )
    assert [placed.index(p) for p in ordered] == [3, 0, 1, 2]


def test_lines_that_look_alike_to_some_eyes_differ_by_their_dashes() -> None:
    """Under deuteranopia, blue and indigo are one, orange and ochre, and green, pink and grey."""
    kinds = [line_class(place).split() for place in range(8)]
    for alike in ({"c0", "c5"}, {"c1", "c4"}, {"c2", "c3", "c6"}):
        dashes = [dash for colour, dash in kinds if colour in alike]
        assert len(dashes) == len(set(dashes)) >= 2


def test_thinning_keeps_the_worst() -> None:
    dots = [Dot(i, 0, i / 5000, 1) for i in reversed(range(5000))]
    few = thin_out(dots, 600)
    assert len(few) <= 600 and few[0].client == 0
    assert shorten("a" * 30, 10) == "a" * 9 + "…"


def test_a_clamped_attack_is_told(tmp_path: Path) -> None:
    page = write_page(sweep(tmp_path / "s", attack={"name": "lie", "fraction": 0.75}))
    assert "lie: z = inf for 3 attackers among 4 clients, clamped to 3." in page.read_text()


def test_many_runs_have_a_page_each(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.report.page.MOST_TOGETHER", 5)
    page = write_page(grid, tmp_path / "all of it.html")
    links = [link for link in Balanced(page.read_text()).links if not link.startswith("#")]
    assert len(links) == 6 and links[0] == "all%20of%20it/000-local_seed%3D0.html"
    for place, link in enumerate(links):
        own = tmp_path / unquote(link)
        text = own.read_text()
        back = [link for link in Balanced(text).links if not link.startswith("#")]
        assert (own.parent / unquote(back[0])).resolve() == page.resolve() and len(back) == (
            2 if place in (0, 5) else 3
        )
        assert all((own.parent / unquote(other)).exists() for other in back)
    assert "ditto seed=1 on digits" in text and "holdfast run config.toml" in text
    assert write_page(grid, tmp_path / "one.html", alone=True).exists() and not (tmp_path / "one").exists()


def test_values_beyond_all_bounds_stay_numbers_that_a_browser_reads() -> None:
    points = [(r, v, v, v) for r, v in ((1, 1.0), (2, 1e50), (3, 1.1))]
    numbers = re.findall(
        r"-?\d[\d.]*", re.findall(r' d="(M[^"]*L[^"]*)"', curves([Series("a", points)], "Loss", False))[0]
    )
    assert all(abs(float(number)) < 2000 for number in numbers)


def test_long_curves_are_thinned_from_their_end() -> None:
    points = [(r, 0.5, 0.5, 0.5) for r in range(1, 1002)]
    assert (
        thinned(points, 400)[-1][0] == 1001
        and len(thinned(points, 400)) == 334
        and thinned(points[:9], 400) == points[:9]
    )


def test_attackers_among_the_clients_are_marked(tmp_path: Path) -> None:
    """Neither the mean nor the worst tenth counts them, so a dot far below both must not look like a client
    that is served badly."""
    out = sweep(tmp_path / "s", attack={"name": "label-flip", "clients": [1, 3]})
    text = render(read_records(out))
    foes = re.findall(r'class="client foe"[^>]*><title>attacker, client (\d+), seed 0', text)
    assert sorted(foes) == ["1", "3"] and text.count('<circle class="client"') == 2
    assert "A hollow triangle is an attacker; both marks leave it out." in text


def test_what_cannot_be_read_or_written_is_one_line(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(single, tmp_path / "s")
    result = next((tmp_path / "s").rglob("result.json"))
    result.write_text('{"final": {}}')
    many = sweep(tmp_path / "many", train={"rounds": 1, "local_epochs": 1}, sweep={"seed": list(range(13))})
    (tmp_path / "taken").touch()
    for words in (
        ["report", str(tmp_path / "s")],
        ["report", str(many), "--out", str(tmp_path / "taken" / "x.html")],
    ):
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"error: {result} is damaged: 'protocol' cannot be read",
        f"error: cannot write {tmp_path / 'taken' / 'x'}: Not a directory; choose another --out",
    ]
