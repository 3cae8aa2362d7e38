"""A reproduction from the command to the page."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import write_json
from holdfast.report.class_counts import Holdings
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.outcome import read_outcome, reproduce, used
from holdfast.reproduction.page import render, title, write_reproduction
from holdfast.reproduction.result_table import result_table
from holdfast.reproduction.study import Study, find, make


@pytest.fixture
def study(small: dict[str, Any], quick_disk: None) -> Study:
    small |= {"printed": "I", "print": {"dataset": "CIFAR-10", "setting": "attack={attack}, malicious=0.3"}}
    small["show"] = [
        {"kind": "rounds"},
        {"kind": "along", "axis": "attack"},
        {"kind": "matrix", "figure": "customisation"},
    ]
    return make(small)


def test_a_reproduction_is_run_read_back_and_written(study: Study, tmp_path: Path) -> None:
    outcome = reproduce(study, StudyRequest(scale="full", seeds=2), tmp_path / "a")
    assert outcome.missing == 0 and len(outcome.finished_runs) == 8
    ours = outcome.ours.get("TAcc(%)", {"attack": "IPM", "method": "Ditto"})
    runs = [run for run in outcome.finished_runs if run.manifest["label"].startswith("IPM Ditto")]
    assert (
        ours is not None
        and len(runs) == 2
        and ours.seeds == tuple(100 * run.final["accuracy"] for run in runs)
    )
    again = read_outcome(tmp_path / "a")
    assert (
        again.ours.labels == outcome.ours.labels == {"attack": ["none", "IPM"], "method": ["Mean", "Ditto"]}
    )  # also in their order
    assert again.ours.by_place == outcome.ours.by_place and again.printed.by_place == outcome.printed.by_place
    assert outcome.printed.mean("TAcc(%)", {"attack": "IPM", "method": "Mean"}) == 10.95
    dealt = int(
        Holdings.of(outcome.grid.planned_runs[0].config, "all").sizes.sum()
    )  # two classes each: not all ten are held
    assert outcome.data == [
        {"dataset": "digits", "clients": 6, "rounds": 2, "participation": 1.0, "samples": dealt, "of": 1797}
    ]

    page = write_reproduction(outcome).read_text()
    assert (
        "FedCAP, Table I: Two methods &lt;under&gt; attack" in page
        and "<under>" not in page
        and "A note &amp; more." in page
    )
    assert f"<span>{ours.mean:.2f} ± {ours.spread:.2f}</span>" in page and "10.95 (" in page
    assert '<table class="sheet">' in page  # of few columns
    assert "holdfast reproduce fedcap table-9 --scale full --seeds 2" in page
    lines = list(csv.DictReader((tmp_path / "a" / "table.csv").open()))
    assert len(lines) == 4
    mean = next(line for line in lines if line["attack"] == "IPM" and line["method"] == "Mean")
    assert float(mean["difference"]) == pytest.approx(float(mean["ours"]) - 10.95) and mean["seeds"] == "2"
    assert "| none |" in (tmp_path / "a" / "table.md").read_text()
    write_json(
        tmp_path / "a" / "data.json",
        {"data": [{**outcome.data[0], "participation": part} for part in (0.5, 1.0)]},
    )
    write_reproduction(read_outcome(tmp_path / "a"))
    shown = [
        line.strip()
        for line in (tmp_path / "a" / "table.md").read_text().splitlines()
        if line.startswith("digits: ")
    ]
    rest = f"2 rounds, {dealt:,} of 1,797 samples."
    assert shown == [f"digits: 6 clients, 50 % of them in a round, {rest}", f"digits: 6 clients, {rest}"]


def test_some_cells_are_scored_by_another_figure(
    small: dict[str, Any], quick_disk: None, tmp_path: Path
) -> None:
    small["metrics"]["TAcc(%)"]["override"] = [{"when": {"method": "Ditto"}, "figure": "accuracy/global"}]
    outcome = reproduce(make(small), StudyRequest(scale="smoke"), tmp_path)
    for method, figure in (("Mean", "accuracy"), ("Ditto", "accuracy/global")):
        run = next(run for run in outcome.finished_runs if method in run.manifest["label"])
        assert outcome.ours.mean("TAcc(%)", {"attack": "IPM", "method": method}) == 100 * run.final[figure]
        assert run.final["accuracy"] != run.final["accuracy/global"] or method == "Mean"


def test_its_title_says_how_much_of_the_data_was_used(study: Study, tmp_path: Path) -> None:
    outcome = reproduce(study, StudyRequest(scale="full"), tmp_path)
    part, parts = " (10 % of digits)", " (4.2 to 100 % of digits)"
    for samples, said in (((1797,), ""), ((1790, 1797), ""), ((180, 181), part), ((1797, 75, 900), parts)):
        write_json(
            tmp_path / "data.json", {"data": [{**outcome.data[0], "samples": some} for some in samples]}
        )
        assert title(read_outcome(tmp_path)) == f"FedCAP, Table I: Two methods <under> attack{said}"


def test_the_same_call_continues_and_another_is_refused(study: Study, tmp_path: Path) -> None:
    out = tmp_path / "a"
    whole = reproduce(study, StudyRequest(scale="full"), out)
    shutil.rmtree(whole.finished_runs[0].path)
    half = read_outcome(out)
    assert half.missing == 1 and "Not complete" in render(half, result_table(half))
    assert reproduce(study, StudyRequest(scale="full"), out).ours.by_place == whole.ours.by_place
    reproduce(study.model_copy(update={"notes": ("Said in other words.",)}), StudyRequest(scale="full"), out)
    assert read_outcome(out).study.notes == ("Said in other words.",)
    same = reproduce(study, StudyRequest(scale="full", changes=(("engine.memory", "1GB"),)), tmp_path / "b")
    fewer = reproduce(study, StudyRequest(scale="full", changes=(("train.rounds", 1),)), tmp_path / "c")
    caution = ", with other settings than the paper&#39;s and with one seed."
    assert [caution in render(one, result_table(one)) for one in (same, fewer)] == [False, True]
    with pytest.raises(ConfigError, match="holds another reproduction"):
        reproduce(study, StudyRequest(scale="full", seeds=2), out)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out .*file/a: cannot create the folder"):
        reproduce(study, StudyRequest(scale="full"), tmp_path / "file" / "a")
    with pytest.raises(ConfigError, match="has no study.json"):
        read_outcome(tmp_path)
    with pytest.raises(ConfigError, match="already holds runs"):
        reproduce(study, StudyRequest(scale="full"), out / "runs")


def test_its_table_is_printed_as_markdown(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce(study, StudyRequest(scale="smoke"), tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["report", str(tmp_path), "--markdown"])
    said = capsys.readouterr().out
    assert (
        not left.value.code
        and said.strip() == (tmp_path / "table.md").read_text().strip()
        and "| IPM |" in said
    )


def test_a_table_of_many_columns_is_set_in_small_letters(small: dict[str, Any], tmp_path: Path) -> None:
    small["axes"]["method"] = {
        f"Mean {seed}": {"method.name": "fedavg", "train.lr": 0.01 + seed / 100} for seed in range(7)
    }
    small["claims"] = []
    outcome = reproduce(make(small), StudyRequest(scale="smoke"), tmp_path)
    assert 'class="sheet dense"' in render(outcome, result_table(outcome))


def test_where_seconds_are_the_result_each_run_is_alone(
    small: dict[str, Any], quick_disk: None, tmp_path: Path
) -> None:
    small |= {"fused": False, "metrics": {"s": {"measure": "seconds", "per_round": True, "better": "less"}}}
    outcome = reproduce(make(small), StudyRequest(scale="smoke"), tmp_path)
    assert len(outcome.finished_runs) == 2 and all(
        run.manifest["group"] == [run.manifest["label"]] for run in outcome.finished_runs
    )
    value = outcome.ours.mean("s", {"attack": "IPM", "method": "Mean"})
    run = outcome.finished_runs[0]
    assert value == pytest.approx((run.final["seconds/client"] + run.final["seconds/server"]) / 2)
    assert (
        reproduce(make(small), StudyRequest(scale="smoke"), tmp_path).ours.by_place == outcome.ours.by_place
    )  # nothing runs again


@pytest.fixture
def ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def go(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["reproduce", *map(str, args)])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return go


def test_the_command(ask: Callable[..., tuple[int, str, str]], quick_disk: None, tmp_path: Path) -> None:
    code, out, _ = ask()
    assert code == 0 and "fedcap table-1" in out
    code, out, _ = ask("fedcap", "I", "--scale", "smoke", "--dry-run")
    assert (
        code == 0 and "experiments of 2 rounds on digits" in out and not (tmp_path / "reproductions").exists()
    )
    command = ("fedcap", "I", "--scale", "smoke", "--only", "method=Mean,FedCAP", "--only", "attack=IPM")
    code, out, _ = ask(*command)
    page = tmp_path / "reproductions" / "fedcap" / "table-1-smoke" / "report.html"
    assert (
        code == 0
        and page.exists()
        and str(page.relative_to(tmp_path)) in out
        and "FedCAP is the most accurate" in out
    )
    shown = json.loads(ask(*command, "--json")[1])["reproductions"][0]
    assert {cell["method"] for cell in shown["cells"]} == {"Mean", "FedCAP"} and shown["missing"] == 0


def test_refusals_are_one_line(ask: Callable[..., tuple[int, str, str]]) -> None:
    for args, message in {
        ("fedcapp",): "did you mean 'fedcap'",
        ("fedcap", "fig-99"): "fedcap has no 'fig-99'",
        ("fedcap", "I", "--scale", "tiny"): "--scale tiny: choose smoke, quick, full",
        ("fedcap", "I", "--only", "attack=XX"): "attack has no 'XX'",
        ("fedcap", "I", "--set", "train.round=3"): "unknown key 'train.round'",
    }.items():
        code, out, err = ask(*args)
        assert code == 2 and message in err and len(err.splitlines()) == 1, (args, err)


def test_set_changes_one_setting_of_a_part_and_not_the_part(ask: Callable[..., tuple[int, str, str]]) -> None:
    """Three skews stay three: --set of one setting of the partition names no other partition."""
    request = [
        "--scale",
        "full",
        "--only",
        "P=1",
        "--only",
        "method=FedAS",
        "--set",
        "data.partition.samples_per_client=160",
    ]
    code, out, _ = ask("fedas", "table-3", *request, "--dry-run", "--json")
    assert code == 0 and json.loads(out)[0]["cells"] == [
        f"{beta} 1 FedAS seed=0" for beta in ("0.1", "0.3", "0.5")
    ]
    assert len(json.loads(ask("--json")[1])) >= 50


def test_a_sample_that_two_clients_hold_is_used_once() -> None:
    (study,) = find("fedcom", "table-1")  # partners hold the same samples of their noise class
    (shown,) = used(StudyGrid(study, StudyRequest(scale="smoke")))
    assert shown["dataset"] == "digits" and 0 < shown["samples"] <= shown["of"] == 1797


def test_claims_that_could_not_be_tested_are_counted(
    small: dict[str, Any], quick_disk: None, tmp_path: Path
) -> None:
    outcome = reproduce(make(small), StudyRequest(scale="full"), tmp_path / "a")
    (ours, printed), *_ = outcome.claim_results
    cases = {True: (1, 1), False: (0, 1), None: (0, 0)}
    found = {holds: (replace(ours, right=right, cases=of), printed) for holds, (right, of) in cases.items()}
    for which, words in (
        ((True, True), "<strong>Holds.</strong> All that the paper claims holds here"),
        ((True, None), "<strong>Holds.</strong> What could be tested holds here"),
        ((True, False, None), "<strong>Holds in part:</strong> 1 of 2 tested claims hold here"),
    ):
        outcome.__dict__["claim_results"] = [found[holds] for holds in which]
        page = render(outcome, result_table(outcome))
        assert words in page and (f"1 of {len(which)} claims could not be tested." in page) == (None in which)


def test_a_damaged_study_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(RunError, match="study.json is damaged: 'study' cannot be read"):
        read_outcome(tmp_path)
