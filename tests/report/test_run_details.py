"""What happened inside a run: shown as it was recorded, attackers marked without colour, small, and none of
it markup."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.report.mixtures import matrices
from holdfast.report.page import render
from holdfast.report.read_runs import RunRecord, read_records
from holdfast.report.run_data import Frame, RunData, evenly, read_run_data
from holdfast.report.run_details import inside, inside_each
from holdfast.report.shaded_grid import LETTERS, STEPS, Scale, ShadedGrid
from holdfast.report.timelines import timelines
from holdfast.storage.store import Store
from tests.report.balanced_html import Balanced
from tests.report.conftest import sweep, text_of

MANY = {"clients": 8, "partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 30}}


@pytest.fixture(scope="session")
def fedcap(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Two attackers, banned as soon as they are twice as far off as the others."""
    method = {"name": "fedcap", "t_norm": 2.0, "t_unit": "median"}
    folder = sweep(
        tmp_path_factory.mktemp("in") / "x",
        method=method,
        data=MANY,
        attack={"name": "ipm", "fraction": 0.25},
    )
    return read_records(folder)[0]


@pytest.fixture(scope="session")
def committee(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = sweep(
        tmp_path_factory.mktemp("in") / "x",
        method={"name": "c-pfl"},
        data=MANY,
        attack={"name": "sign-flip", "fraction": 0.25},
    )
    return read_records(folder)[0]


@pytest.fixture(scope="session")
def matched(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    data = {
        "clients": 6,
        "partition": {"name": "complementary-pairs", "ratio": 0.8, "samples_per_client": 40},
    }
    return read_records(
        sweep(tmp_path_factory.mktemp("in") / "x", method={"name": "fedcom", "channels": 1}, data=data)
    )[0]


def grids(text: str) -> dict[str, dict[str, Any]]:
    """What the fields of a page tell the script, by their names."""
    found = re.findall(r"aria-label=\"([^\"]*): arrow keys read the values\"\s+data-grid='([^']*)'", text)
    return {unescape(name): json.loads(unescape(data)) for name, data in found}


def unpacked(grid: dict[str, Any], frame: int = -1) -> np.ndarray:
    """As the script does it."""
    text = grid["frames"][frame]
    codes = np.array(
        [64 * LETTERS.index(text[i]) + LETTERS.index(text[i + 1]) for i in range(0, len(text), 2)],
        dtype=float,
    )
    codes[codes > STEPS] = np.nan
    shares = codes.reshape(len(grid["rows"]), len(grid["columns"])) / STEPS
    if grid["log"]:
        return grid["low"] * (grid["high"] / grid["low"]) ** shares
    return grid["low"] + shares * (grid["high"] - grid["low"])


def fineness(grid: dict[str, Any]) -> float:
    return 0.51 * (grid["high"] - grid["low"]) / STEPS


def client(name: str) -> int:
    return int(name.removeprefix("▲ "))


def test_weights_are_those_of_the_run_and_attackers_stand_first(fedcap: RunRecord) -> None:
    grid = grids(text_of(*inside(fedcap)))["Weight in the aggregate by client and round"]
    bad = fedcap.run.malicious()
    assert grid["rows"][:2] == [f"▲ {one}" for one in bad] and not any(
        "▲" in name for name in grid["rows"][2:]
    )
    ids, seen = [client(name) for name in grid["rows"]], unpacked(grid)
    assert sorted(ids) == list(range(8))
    for row in fedcap.run.table("weights").itertuples():
        assert seen[ids.index(row.client), row.round - 1] == pytest.approx(row.value, abs=fineness(grid))


def test_bans_are_crosses_with_their_reasons_and_a_threshold(fedcap: RunRecord) -> None:
    text, banned, run_data = text_of(*inside(fedcap)), fedcap.run.table("turned-away"), read_run_data(fedcap)
    assert set(banned["client"]) >= set(fedcap.run.malicious())  # else the test shows nothing
    says = grids(text)["Length of the update by client and round"]["says"]
    first = banned.iloc[0]
    assert f"banned in round {first['round']}: {first['reason']}" in says.values()
    assert 'class="m ban"' in text and f"{len(banned)} clients were banned, 2 of them attackers" in text
    norms = fedcap.run.store.arrays(1)["verdict/scores/norm/norm"]
    assert run_data and run_data.numbers["scores/norm/norm/bound"][0] == pytest.approx(
        2 * float(norms.quantile(0.5))
    )  # as the detector had it
    assert re.search(r'class="boundary"[^>]*>threshold [\d.]+<', text) and ">▲ attackers<" in text


def test_the_slider_has_every_round_of_the_matrix(fedcap: RunRecord) -> None:
    text = text_of(*inside(fedcap))
    grid, table = grids(text)["Models that each client received"], fedcap.run.table("customisation")
    rounds, ids = sorted(table["round"].unique()), [client(name) for name in grid["rows"]]
    assert grid["rounds"] == rounds and f'type="range" min="0" max="{len(rounds) - 1}"' in text
    for frame, round in enumerate(rounds):
        one = (
            table[table["round"] == round]
            .pivot(index="client", columns="other", values="value")
            .reindex(index=ids, columns=ids)
        )
        np.testing.assert_allclose(unpacked(grid, frame), one.to_numpy(), atol=fineness(grid))
    cells = re.search(r'Models that each.*?<g class="counts">(.*?)</g>', text, re.S)
    words = [f"{100 * v:.0f}" if v >= 0.005 else "" for v in one.to_numpy().flatten()]
    assert cells and re.findall(r">([^<]*)</text>", cells[1]) == words


def test_the_committee_its_seats_votes_and_decisions(committee: RunRecord) -> None:
    text = text_of(*inside(committee))
    found, prefix = grids(text), "verdict/tables/committee/"
    last = {
        name.removeprefix(prefix): v
        for name, v in committee.run.store.arrays(3).items()
        if name.startswith(prefix)
    }
    votes, passed = found["Votes of the members"], last["admitted"]
    assert [client(name) for name in votes["names"][-1][:-2]] == last["members"].tolist() and votes["names"][
        -1
    ][-2:] == ["score", "passed"]
    columns = [client(name) for name in votes["columns"]]
    seen = unpacked(votes)[:, [columns.index(i) for i in last["ids"].tolist()]]
    np.testing.assert_allclose(seen[:-2], last["votes"].numpy(), atol=fineness(votes))
    np.testing.assert_allclose(seen[-2], last["accuracy"].numpy(), atol=fineness(votes))
    assert seen[-1].tolist() == passed.double().tolist()
    assert text.count("✓") == int(passed.sum()) and text.count("✗") == int((~passed).sum())
    seats = sum(len(committee.run.store.arrays(r)[f"{prefix}members"]) for r in (1, 2, 3))
    says = list(found["The committee's score by client and round"]["says"].values())
    assert says.count("on the committee") == seats and says.count("rejected") == sum(
        len(p["rejected"]) for p in committee.parts
    )
    assert f"threshold {100 * float(last['threshold']):.3g} %" in text


def test_matches_right_and_wrong(matched: RunRecord) -> None:
    text = text_of(*inside(matched))
    metrics = [part["metrics"] for part in matched.parts]
    right, decisions = (sum(m[f"matching/{name}"] for m in metrics) for name in ("right", "decisions"))
    assert f"{right} of {decisions} decisions name the true partner" in text
    grid = grids(text)["Peers by client and round"]
    assert list(grid["says"].values()).count("right") == right and len(grid["says"]) == decisions
    told = matched.run.store.arrays(2)["verdict/tables/matches"]
    assert [int(said) for said in grid["texts"][1::3]] == [int(row[row != -1][0]) for row in told]
    often = unpacked(grids(text)["How often each client received each other's model"])
    assert often.sum() == pytest.approx(decisions, abs=0.1)


def test_a_match_in_an_unknown_federation_is_neither_right_nor_wrong(
    matched: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.report.mixtures._facts", lambda record: {})
    text = text_of(*inside(matched))
    assert "decisions name" not in text and "says" not in grids(text)["Peers by client and round"]


def test_every_client_has_a_chart_and_every_round_its_bytes(fedcap: RunRecord) -> None:
    text, frame, bad = text_of(*inside(fedcap)), fedcap.run.clients(3), fedcap.run.malicious()
    for one, accuracy in zip(frame["client"], frame["accuracy/personal"], strict=True):
        words = f"client {one}{', an attacker' if one in bad else ''}"
        assert re.search(rf"<title>{words}[,:][^<]*accuracy {100 * accuracy:.1f} % finally", text), words
    assert text.count('<svg class="foe"') == 2 and text.count('<svg class="own"') == 6
    assert "Bytes and seconds, round by round" in text and ">clients " in text and ">down " in text


def test_attackers_that_change_are_marked_in_their_rounds(tmp_path: Path) -> None:
    record = read_records(
        sweep(tmp_path / "x", data=MANY, attack={"name": "ipm", "fraction": 0.25, "redraw": True})
    )[0]
    text = text_of(*inside(record))
    says = grids(text)["Length of the update by client and round"]["says"]
    assert "attacks in this round" in text and "▲ 0" not in text
    assert set(says) == {f"{one},{round - 1}" for round in (1, 2, 3) for one in record.run.malicious(round)}


def test_nothing_for_a_run_that_recorded_nothing(single: Path) -> None:
    record = read_records(single)[0]
    text = text_of(*inside(record))
    assert (
        "▲" not in text
        and "No client was banned or rejected." in text
        and "committee" not in text
        and "matched" not in text
    )
    record.round, record.parts = 0, []
    assert inside(record) == [] and inside_each([record, record]) == []


def test_nothing_that_was_recorded_becomes_markup(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil, plain = "'\"</script><img src=x onerror=alert(1)>", Store.arrays

    def arrays(self: Store, round: int) -> dict[str, torch.Tensor]:
        told = {f"verdict/tables/{evil}": torch.rand(4), f"verdict/scores/{evil}/x": torch.rand(4)}
        return {**plain(self, round), **told, f"verdict/tables/m{evil}": torch.rand(4, 3)}

    monkeypatch.setattr(Store, "arrays", arrays)
    records = read_records(single)
    for part in records[0].parts:
        part["banned"], part["rejected"] = {"1": evil}, {"2": evil}
    text = render(records)
    seen = Balanced(text)
    assert "img" not in seen.tags and seen.tags["script"] == 2 and evil not in text
    assert f"Recorded: m{evil}" in grids(text)
    assert any(f"banned in round 1: {evil}" in grid.get("says", {}).values() for grid in grids(text).values())


def test_a_long_run_of_many_clients_stays_small() -> None:
    """20 clients and 100 rounds, a value of its own in every cell."""
    n, rounds, draw = 20, list(range(1, 101)), np.random.default_rng(0)
    bad = np.zeros((n, 100), dtype=bool)
    bad[:6] = True
    run_data = RunData(list(range(n)), n, rounds, 100, bad, frozenset(range(6)))
    run_data.grids = {name: draw.random((n, 100)) for name in ("weights", "norms", "fim", "scores/a/b")}
    run_data.rejected = {(one, round): "no" for one in range(n) for round in rounds[::2]}
    assert len(text_of(timelines(run_data))) < 300_000
    names = [str(i) for i in range(n)]
    assert (
        len(ShadedGrid("m", names, names, draw.random((25, n, n)), rounds=rounds[::4], square=True).html())
        < 80_000
    )


def test_of_many_clients_and_rounds_some_are_read(monkeypatch: pytest.MonkeyPatch, fedcap: RunRecord) -> None:
    some = evenly(range(1, 1001), 100)
    assert some[0] == 1 and some[-1] == 1000 and len(some) == 100
    monkeypatch.setattr("holdfast.report.run_data.MOST_CLIENTS", 4)
    run_data = read_run_data(fedcap)
    assert run_data and len(run_data.clients) == 4 and run_data.everyone == 8
    assert run_data.clients[:2] == fedcap.run.malicious() and run_data.attackers == 2


def test_a_sweep_has_each_run_closed_and_keeps_within_its_budget(grid: Path) -> None:
    records = read_records(grid)
    text = text_of(*inside_each(records))
    assert text.count('<details class="inside">') == len(records) == 6 and text.count("<section>") == 1
    Balanced(text)
    budget = sum(len(section.body) for section in inside(records[0])) + 10
    short = text_of(*inside_each(records, budget=budget))
    assert 1 <= short.count("<details") < 6 and "Left out to keep this page small: the details of" in short
    assert inside_each(records * 3) == []


def test_scales() -> None:
    assert Scale.over(np.array([0.2, 0.3])) == Scale(0.2, 0.3) and Scale.over(np.array([0.1, 0.4])) == Scale(
        0.0, 0.4
    )
    assert Scale.over(np.array([1.0, 1.0, 1.0, 100.0])) == Scale(1.0, 100.0, log=True)
    assert not Scale.over(np.array([0.01, 0.01, 0.01, 0.9]), share=True).log
    assert Scale.over(np.array([np.nan])) == Scale(0.0, 1.0) and Scale.over(np.array([3.0, 3.0])) == Scale(
        0.0, 3.0
    )
    scale = Scale(0.0, 1.0)
    assert scale.levels(np.array([0.0, 0.01, 0.5, 1.0, np.nan, np.inf])).tolist() == [0, 1, 7, 12, -1, 12]
    assert scale.packed(np.array([0.0, 1.0, np.nan])) == "AA/+//"  # 0, 4094 and 4095
    assert Scale(1.0, 100.0, log=True).shares(np.array([10.0]))[0] == pytest.approx(0.5)


def test_another_methods_matrix_has_numbered_columns() -> None:
    run_data = RunData([0, 1], 2, [1, 2], 2, np.zeros((2, 2), dtype=bool))
    run_data.frames = {
        "held": [
            Frame(round, np.array([0, 1]), np.arange(3), np.full((2, 3), float(round))) for round in (1, 2)
        ]
    }
    grid = grids(text_of(*matrices(run_data)))["Recorded: held"]
    assert grid["columns"] == ["0", "1", "2"] and unpacked(grid, 0) == pytest.approx(
        np.ones((2, 3)), abs=1e-3
    )
