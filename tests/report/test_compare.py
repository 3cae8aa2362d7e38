"""Runs side by side: the statistics against scipy and by hand, the lines, and what the command says."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from holdfast.cli import main
from holdfast.core.errors import ConfigError
from holdfast.methods.ditto import Ditto
from holdfast.report.compare import Comparison, read_lines
from holdfast.report.compare_tables import as_markdown, parts, signed, writer
from holdfast.report.config_differences import MISSING, differing
from holdfast.report.paired_tests import holm, paired, smallest
from holdfast.report.read_runs import Dot, RunRecord, read_records
from holdfast.storage.store import Store
from tests.report.conftest import sweep

SHORT = {"rounds": 1, "local_epochs": 1}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods under four seeds."""
    axes = {"method.name": ["fedavg", "ditto", "local"], "seed": [0, 1, 2, 3]}
    return sweep(tmp_path_factory.mktemp("runs") / "table", train=SHORT, sweep=axes)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["compare", *map(str, args)])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


def test_a_pair_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, so t = 2 sqrt 3 = 3.4641 with 2 degrees of
    freedom: p = 1 - t / sqrt(t^2 + 2) = 0.0742; the 97.5 % point of that t is 4.3027. All of one sign: the
    signed ranks have p = 2 / 2^3."""
    test = paired([1.0, 2.0, 3.0])
    assert test.mean == 2.0 and test.wilcoxon == pytest.approx(0.25)
    assert test.t == pytest.approx(1 - (12 / 14) ** 0.5, rel=1e-9) and test.t == pytest.approx(
        0.0742, abs=5e-5
    )
    assert (test.low, test.high) == (
        pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-6),
        pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-6),
    )


def test_a_pair_as_scipy_has_it() -> None:
    first, second = [0.61, 0.55, 0.70, 0.64, 0.58, 0.66, 0.59], [0.66, 0.54, 0.78, 0.67, 0.60, 0.75, 0.65]
    test = paired([b - a for a, b in zip(first, second, strict=True)])
    whole = stats.ttest_rel(second, first)
    assert test.t == pytest.approx(whole.pvalue) and test.wilcoxon == pytest.approx(
        stats.wilcoxon(second, first).pvalue
    )
    assert (test.low, test.high) == pytest.approx(tuple(whole.confidence_interval(0.95)))


def test_what_cannot_be_tested_is_not() -> None:
    assert paired([0.1, 0.2]).t is None and paired([0.1]).low is None
    same = paired([0.0, 0.0, 0.0])
    assert (same.mean, same.t, same.wilcoxon) == (0.0, None, None)
    steady = paired([0.1, 0.1, 0.1])
    assert steady.t is None and steady.wilcoxon == pytest.approx(0.25) and steady.low == steady.high
    assert [smallest(n) for n in (3, 5, 6)] == [0.25, 0.0625, 0.03125]


def test_holm_by_hand() -> None:
    """Of 0.01, 0.04, 0.03, 0.005: 4 x 0.005, 3 x 0.01, 2 x 0.03, then 0.04, which may not fall below the one
    before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, None, 0.7]) == [1.0, None, 1.0] and holm([]) == []


def test_only_what_differs_is_told() -> None:
    ditto = {"method": {"name": "ditto", "lam": 0.5}, "attack": None, "train": {"lr": 0.1, "rounds": 3}}
    stronger = {**ditto, "method": {"name": "ditto", "lam": 1.0}}
    other = {
        "method": {"name": "fedprox", "mu": 0.1},
        "attack": {"name": "ipm", "f": 0.2},
        "train": {"lr": 0.2, "rounds": 3},
    }
    assert differing([ditto, stronger, other]) == {
        "method": ["ditto", "ditto", "fedprox"],
        "method.lam": [0.5, 1.0, MISSING],
        "attack": [None, None, "ipm"],
        "train.lr": [0.1, 0.1, 0.2],
    }
    assert differing([ditto, ditto]) == {}


def test_what_differs_has_the_settings_that_only_one_method_has_unless_they_are_its_defaults() -> None:
    fedcap = {"method": {"name": "fedcap", "phi": 2.5}}
    ditto = {"method": {"name": "ditto", "lam": Ditto().lam}}
    assert differing([fedcap, ditto, {"method": "fedavg"}]) == {
        "method": ["fedcap", "ditto", "fedavg"],
        "method.phi": [2.5, MISSING, MISSING],
    }


def test_lines_differences_and_tests(seeds: Path) -> None:
    comparison = Comparison(read_lines([seeds]))
    assert [line.label for line in comparison.lines] == ["fedavg", "ditto", "local"] and list(
        comparison.differs
    ) == ["method"]
    told = comparison.plain()
    by_label = {line["label"]: line for line in told["lines"]}
    first, second = (
        [by_label[name]["values"][str(seed)] for seed in range(4)] for name in ("fedavg", "ditto")
    )
    assert by_label["ditto"]["difference"] == pytest.approx(
        statistics.fmean(second) - statistics.fmean(first)
    )
    assert by_label["fedavg"]["difference"] is None and by_label["ditto"]["std"] == pytest.approx(
        statistics.stdev(second)
    )
    pair = told["pairs"][0]
    assert (pair["setting"], pair["against"], pair["seeds"]) == ("ditto", "fedavg", [0, 1, 2, 3]) and len(
        told["pairs"]
    ) == 3
    assert pair["t"]["p"] == pytest.approx(stats.ttest_rel(second, first).pvalue)
    assert [p["t"]["holm"] for p in told["pairs"]] == holm([p["t"]["p"] for p in told["pairs"]])
    assert any("cannot give less than 0.125" in note for note in told["notes"])
    corrected = [
        p["t"]["holm"] for p in told["pairs"] if p["t"]["holm"] is not None
    ]  # a round of ditto from the start is one of local
    sure = sum(p < 0.05 for p in corrected)
    assert any(f"{sure or 'none'} of {len(corrected)} differences" in note for note in told["notes"])


def test_clients_are_paired_within_one_seed(seeds: Path) -> None:
    pair = Comparison(read_lines([seeds])).plain()["pairs"][1]  # local less fedavg
    records = {record.label: record for record in read_records(seeds)}
    here = records["fedavg seed=0"].run.clients()["accuracy/global"].to_numpy()
    there = records["local seed=0"].run.clients()["accuracy/personal"].to_numpy()
    of = pair["clients"]
    assert (of["seed"], of["clients"]) == (0, 4) and of["difference"] == pytest.approx((there - here).mean())
    assert (of["better"], of["worse"]) == (int((there > here).sum()), int((there < here).sum()))


def test_the_sign_is_that_of_the_label(
    seeds: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """'ditto − fedavg', where ditto is 10, 20, 30 and 40 points better: +25 points, in the terminal, on the
    page, in Markdown, as JSON and in Python. Of the two clients, ditto serves one 50 points better and one 10
    points worse: +20."""
    by_hand = {"fedavg": 0.5, "ditto": 0.6, "local": 0.5}
    of_clients = {"fedavg": (0.4, 0.5), "ditto": (0.9, 0.4), "local": (0.4, 0.5)}

    def final(record: RunRecord) -> dict[str, Any]:
        gain = 0.1 * record.seed if record.method == "ditto" else 0.0
        return {"accuracy": by_hand[record.method] + gain}

    def dots(record: RunRecord) -> list[Dot]:
        return [Dot(i, record.seed, a, 10) for i, a in enumerate(of_clients[record.method])]

    monkeypatch.setattr(RunRecord, "final", property(final))
    monkeypatch.setattr(RunRecord, "dots", dots)
    comparison = Comparison(read_lines([seeds]))
    assert [pair.label for pair in comparison.pairs] == ["ditto − fedavg", "local − fedavg", "local − ditto"]
    assert comparison.difference(comparison.lines[1]) == pytest.approx(0.25)
    pair = comparison.plain()["pairs"][0]
    assert pair["label"] == "ditto − fedavg" and pair["difference"] == pytest.approx(0.25)
    assert (pair["clients"]["better"], pair["clients"]["worse"]) == (1, 1)
    assert pair["clients"]["difference"] == pytest.approx(0.2)
    _, out, _ = cli(seeds, "--out", tmp_path / "page.html")
    _, markdown, _ = cli(seeds, "--markdown")
    page = re.sub(r"<[^>]*>", " ", (tmp_path / "page.html").read_text())
    for text in (out, markdown, page):
        said = [" ".join(line.replace("|", " ").split()) for line in text.splitlines()]
        over_seeds, over_clients = (line for line in said if line.startswith("ditto − fedavg "))
        assert "4 +25.00 points +4.46 to +45.54" in over_seeds
        assert "0 2 1 1 +20.00 points" in over_clients
        assert any(line.startswith("local − ditto ") and "−25.00 points" in line for line in said)


def test_a_line_is_found_by_its_method_its_words_or_its_folder(duel: Path) -> None:
    lines = read_lines([duel])
    assert [line.label for line in lines][:2] == ["fedavg none", "fedavg ipm"]
    assert Comparison(lines, against="ipm fedavg").reference is lines[1]
    assert Comparison(lines[2:4], against="fedavg").reference is lines[2]
    one = lines[1].records[0].path
    assert Comparison(lines, against=str(one)).reference is lines[1]
    with pytest.raises(
        ConfigError, match="3 lines fit 'fedavg'; name one of them: 'fedavg none', 'fedavg ipm'"
    ):
        Comparison(lines, against="fedavg")


def test_against_one_line_tests_only_with_it(seeds: Path) -> None:
    comparison = Comparison(read_lines([seeds]), "accuracy/worst10", "ditto")
    assert [pair.label for pair in comparison.pairs] == ["fedavg − ditto", "local − ditto"]
    with pytest.raises(ConfigError, match="did you mean 'ditto'"):
        Comparison(read_lines([seeds]), against="dito")


def test_seeds_of_one_setting_come_from_several_folders(seeds: Path, tmp_path: Path) -> None:
    records = [seeds / f"{n:03d}-fedavg_seed={n}" for n in range(4)]
    (line,) = read_lines(records[:3])
    assert line.seeds == 3 and len(read_lines([seeds, seeds])) == 3
    (tmp_path / "again").symlink_to(records[0])
    assert [line.seeds for line in read_lines([records[0], tmp_path / "again"])] == [
        1
    ]  # one run, whatever it is called


def test_the_same_experiment_in_two_folders_is_two_lines(tmp_path: Path) -> None:
    folders = [sweep(tmp_path / name, train=SHORT) for name in ("here", "there")]
    lines = read_lines(folders)
    assert [line.label for line in lines] == ["fedavg (here)", "fedavg (there)"]
    comparison = Comparison(lines)
    assert comparison.differs == {} and comparison.difference(lines[1]) == 0.0
    assert any("at least 3 finished seeds" in note and "shares 1" in note for note in comparison.notes)
    assert [part.title for part in parts(comparison)] == [
        "Figures",
        "Accuracy, paired over the clients of one seed",
    ]


def test_a_run_that_goes_on_is_shown_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Store.commit

    def stop(self: Store, round: int) -> None:
        plain(self, round)
        if round == 2:
            raise KeyboardInterrupt

    done = sweep(tmp_path / "done", method="local")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path / "begun")
    comparison = Comparison(read_lines([done, tmp_path / "begun"]))
    assert comparison.difference(comparison.lines[1]) is None
    assert (
        "1 run is not finished and left out of differences and tests: begun (in round 3)." in comparison.notes
    )


def test_the_command(seeds: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    page = tmp_path / "page.html"
    code, out, _ = cli(seeds, "--out", page)
    assert (
        code == 0
        and "accuracy, paired over seeds" in out
        and "This is about clients, not about seeds" in " ".join(out.split())  # a narrow terminal wraps it
        and str(page) in out
    )
    text = page.read_text()
    assert "default-src 'none'" in text and "ditto − fedavg" in text and not text.count("http:")
    code, out, _ = cli(seeds, "--json", "--metric", "bytes/up")
    assert code == 0 and json.loads(out)["metric"] == "bytes/up"
    code, out, _ = cli(seeds, "--markdown", "--metric", "loss")
    assert code == 0 and out.startswith("### Figures") and "| loss |" in out
    assert as_markdown(Comparison(read_lines([seeds]), "loss")) == out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--metric", "acuracy"], "did you mean 'accuracy'"),
        (["--metric", "attack/asr"], "none of these runs has a value"),
        (["--out", "page.txt"], "must end in .html"),
        (["--open"], "name the page"),
        (["--json", "--markdown"], "not both"),
    ],
)
def test_refusals(seeds: Path, cli: Callable[..., tuple[int, str, str]], args: list[str], said: str) -> None:
    code, out, err = cli(seeds, *args)
    assert code == 2 and out == "" and said in err


def test_a_folder_without_runs_or_none_at_all(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    assert "no run in" in cli(tmp_path)[2] and "there is no such folder" in cli(tmp_path / "nowhere")[2]


def test_figures_are_written_by_what_they_are() -> None:
    assert [writer(name)(0.5) for name in ("accuracy/worst10", "seconds/client", "loss")] == [
        "50.0 %",
        "0.5 s",
        "0.5",
    ]
    assert (
        signed("accuracy", -0.0123) == "−1.23 points"
        and signed("bytes/up", 2e6) == "+2.0 MB"
        and signed("loss", -0.5) == "−0.5"
    )


def test_the_difference_stands_beside_the_metric(grid: Path) -> None:
    """The table is wider than a screen: at its end it would not be seen."""
    lines = read_lines([grid])
    assert parts(Comparison(lines))[0].table.titles[1:4] == ("accuracy", "seeds", "difference")
    assert parts(Comparison(lines, "loss"))[0].table.titles[1:5] == (
        "seeds",
        "loss",
        "difference",
        "accuracy",
    )
