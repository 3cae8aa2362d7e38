"""Tables of hand-written rounds, and what is made of them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from holdfast.core.errors import ConfigError
from holdfast.diagnostics.computed import top_fim
from holdfast.diagnostics.recorded import diagnose
from holdfast.report.axis import Axis
from holdfast.results.run import Run
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store, commit_all

IDS = torch.tensor([2, 5, 7])


@pytest.fixture
def written(simulate: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """A run whose rounds are those given, and whose client 5 is malicious."""

    def write(*rounds: dict[str, Any], parts: tuple[dict[str, Any], ...] = ()) -> Run:
        run = simulate(train={"rounds": 1})
        run.manifest["malicious"] = [5]
        store = Store(tmp_path / "written").open()
        for place, arrays in enumerate(rounds, start=1):
            part = {
                "round": place,
                "metrics": {"bytes/up": 10 * place, "bytes/down": 20},
                **(parts[place - 1] if parts else {}),
            }
            commit_all([store.prepare(place, {}, part, arrays, RowStore(store.path / "rows"))])
        store.close()
        run.path, run.store = store.path, store
        return run

    return write


def verdict(**tables: Any) -> dict[str, torch.Tensor]:
    named = {f"verdict/tables/{name.replace('__', '/')}": value for name, value in tables.items()}
    return {"verdict/ids": IDS, "cohort": IDS, **named}


def rows(frame: pd.DataFrame) -> list[tuple]:
    return [tuple(row) for row in frame.itertuples(index=False)]


def test_a_number_per_client_over_two_rounds(written: Callable[..., Run]) -> None:
    """A client without a number has no row."""
    nan = float("nan")
    run = written(verdict(norms=torch.tensor([1.0, 8.0, 3.0])), verdict(norms=torch.tensor([2.0, nan, 6.0])))
    assert rows(run.table("norms")) == [
        (1, 2, False, 1.0),
        (1, 5, True, 8.0),
        (1, 7, False, 3.0),
        (2, 2, False, 2.0),
        (2, 7, False, 6.0),
    ]
    found = diagnose(run, "norms")
    assert [(one.label, one.points) for one in found.figures[0].series] == [
        ("benign", [(1, 2.0, 1.0, 3.0), (2, 4.0, 2.0, 6.0)]),
        ("malicious", [(1, 8.0, 8.0, 8.0)]),
    ]
    assert found.short["benign"].tolist() == [2.0, 4.0] and found.short["malicious"].isna().tolist() == [
        False,
        True,
    ]


def test_attackers_that_are_redrawn_are_those_of_the_round(written: Callable[..., Run]) -> None:
    one, two = (verdict(norms=torch.ones(3)) | {"malicious": torch.tensor([who])} for who in (2, 7))
    run = written(one, two)
    run.manifest["malicious"] = None
    assert run.table("norms")["malicious"].tolist() == [True, False, False, False, False, True]


def test_a_matrix_has_the_ids_of_its_own_rows_and_columns(written: Callable[..., Run]) -> None:
    """The cohort is not those whom the server had a verdict on: a client may be lost, and the pool is the
    last round's."""
    arrays = verdict(
        customisation=torch.tensor([[0.25, 0.75], [0.0, 1.0]]), customisation__pool=torch.tensor([5, 9])
    )
    run = written(arrays | {"cohort": torch.tensor([2, 5])})
    assert rows(run.table("customisation")) == [
        (1, 2, False, 5, 0.25),
        (1, 2, False, 9, 0.75),
        (1, 5, True, 5, 0.0),
        (1, 5, True, 9, 1.0),
    ]
    assert "customisation/pool" not in run.tables
    found = diagnose(run, "customisation")
    cells = found.figures[0]
    assert (
        cells.values == [[0.25, 0.0], [0.75, 1.0]]
        and cells.texts == [["25", "0"], ["75", "100"]]
        and cells.most == 1.0
    )
    assert cells.heads == ["5*", "9"] and cells.names == ["2", "5*"]
    assert found.short["most of"].tolist() == ["9: 0.75, 5: 0.25", "9: 1, 5: 0"]


def test_a_committee_judges_those_who_were_left(written: Callable[..., Run]) -> None:
    """Client 5 was turned away before: scores and votes are of 2 and 7, whose names the table `ids` has."""
    committee = {
        "ids": torch.tensor([2, 7]),
        "members": torch.tensor([1, 4, 5]),
        "votes": torch.tensor([[0.5, 0.25]] * 3),
        "accuracy": torch.tensor([0.5, 0.25]),
        "threshold": torch.tensor([0.4]),
        "admitted": torch.tensor([True, False]),
        "clients": torch.tensor([2, 5, 7, 8]),
        "total": torch.tensor([1.0, 2, 3, 4]),
    }
    run = written(verdict(**{f"committee-2__{name}": value for name, value in committee.items()}))
    assert {"committee-2/ids", "committee-2/clients"}.isdisjoint(
        run.tables
    ) and "committee-2/votes" in run.tables
    assert rows(run.table("committee-2/accuracy")) == [(1, 2, False, 0.5), (1, 7, False, 0.25)]
    assert rows(run.table("committee-2/members")) == [(1, 1, False), (1, 4, False), (1, 5, True)]
    assert rows(run.table("committee-2/threshold"))[0] == pytest.approx((1, 0.4))
    assert run.table("committee-2/total")["client"].tolist() == [2, 5, 7, 8]
    assert rows(run.table("committee-2/votes"))[:2] == [(1, 1, False, 2, 0.5), (1, 1, False, 7, 0.25)]
    scores, sittings = diagnose(run, "committee-2/accuracy").figures
    assert [one.label for one in scores.series] == ["clients", "threshold"] and sittings.names == [
        "1",
        "4",
        "5*",
    ]
    assert diagnose(run, "committee-2/admitted").figures[0].series[0].points == [(1, 0.5, 0.5, 0.5)]


def test_matches_name_class_and_peer(written: Callable[..., Run]) -> None:
    run = written(verdict(matches=torch.tensor([[-1, 7], [-1, -1], [0, -2]])))
    assert rows(run.table("matches")) == [(1, 2, False, 1, 7), (1, 7, False, 0, 0), (1, 7, False, 1, -2)]
    assert diagnose(run, "matches").figures[0].texts == [["", "0"], ["7", "none"]]  # peer 0 is a peer


def test_what_no_list_knows_is_laid_out_by_its_shape(written: Callable[..., Run]) -> None:
    run = written(
        verdict(mine=torch.tensor([1, 2, 3]), several=torch.tensor([4.0, 5.0]), one=torch.tensor(6.0))
    )
    assert run.table("mine")["client"].tolist() == [2, 5, 7]
    assert rows(run.table("several")) == [(1, 4.0), (1, 5.0)] and rows(run.table("one")) == [(1, 6.0)]


def test_seconds_bytes_and_who_was_turned_away(written: Callable[..., Run]) -> None:
    part = {
        "seconds": {"client": 2.0, "server/match": 0.5},
        "banned": {"5": "too long"},
        "rejected": {"7": "late"},
    }
    run = written(verdict(), verdict(), parts=(part, {}))
    assert rows(run.table("turned-away")) == [
        (1, 5, True, "banned", "too long"),
        (1, 7, False, "rejected", "late"),
    ]
    assert rows(run.table("seconds")) == [(1, "client", 2.0), (1, "server/match", 0.5)]
    assert run.table("bytes")["value"].tolist() == [10, 20, 20, 20]
    assert diagnose(run, "bytes").short.iloc[-1].tolist() == [
        "all",
        pytest.approx(30e-6),
        pytest.approx(40e-6),
    ]
    assert diagnose(run, "turned-away").figures[0].values == [[1.0, 0.1], [0.0, 0.0]]


def test_an_unknown_table_and_an_unknown_round_are_refused(written: Callable[..., Run]) -> None:
    run = written(verdict(customisation=torch.eye(3), customisation__pool=IDS))
    with pytest.raises(ConfigError, match="has no table 'norm'; it has customisation, seconds, bytes"):
        run.table("norm")
    with pytest.raises(ConfigError, match="--round: this table has rounds 1 to 1, and none for round 3"):
        diagnose(run, "customisation", round=3)


def test_every_figure_is_written_as_numbers_picture_and_page(
    written: Callable[..., Run], tmp_path: Path
) -> None:
    run = written(
        verdict(norms=torch.tensor([1.0, 5000.0, float("inf")]), matches=torch.tensor([[7], [-1], [2]])),
        verdict(norms=torch.tensor([1.0, 2.0, 3.0])),
        parts=({"rejected": {"5": "<b>"}}, {}),
    )
    for what in ("norms", "matches", "turned-away", "bytes"):
        found = diagnose(run, what)
        for ending in ("csv", "png", "pdf", "svg", "html"):
            found.write(tmp_path / f"{what}.{ending}")
        assert len(pd.read_csv(tmp_path / f"{what}.csv")) == len(found.frame)
        assert (
            len(Image.open(tmp_path / f"{what}.png").convert("L").getcolors() or []) > 10
        )  # something is drawn
        page = (tmp_path / f"{what}.html").read_text()
        svg = page[page.index("<svg") : page.index("</svg>") + 6]
        assert ElementTree.fromstring(svg).tag == "svg" and "<b>" not in page.split("</style>")[1].replace(
            "<b></b>", ""
        )
    assert "1 values that are not finite" in diagnose(run, "norms").figures[0].note


def test_a_map_that_is_too_large_is_cut_and_says_so(written: Callable[..., Run]) -> None:
    many = torch.arange(200)
    arrays = verdict(customisation=torch.eye(200), customisation__pool=many) | {
        "verdict/ids": many,
        "cohort": many,
    }
    found = diagnose(written(arrays), "customisation")
    cells = found.figures[0]
    assert (
        len(cells.names) == 150
        and len(cells.heads) == 200
        and {len(column) for column in cells.values} == {150}
    )
    assert (
        "Drawn are 150 of 200 rows and 200 of 200 columns." in cells.note
        and len(found.frame) == 200**2
        and len(found.short) == 40
    )


def test_axes() -> None:
    def over(low: float, high: float) -> Axis:
        return Axis.over([(1, low, low, low), (2, high, high, high)])

    assert over(0.5, 500).log and over(0.5, 500).ticks == pytest.approx([0.1, 1, 10, 100, 1000])
    assert over(0.5, 500).share(10) == pytest.approx(0.5) and over(0.5, 500).share(0) == 0
    assert (
        not over(0.0, 500).log
        and over(0.1, 1).ticks[0] == 0
        and over(0.99, 1).ticks[0] == 0
        and over(0.5, 1).ticks[0] == 0.5
    )
    assert over(-2, 2).share(0) == pytest.approx(0.5) and over(3, 3).ticks[0] == 0


def test_what_is_recorded_by_real_runs(simulate: Callable[..., Run]) -> None:
    attack, data = {"name": "gaussian", "sigma": 1.7e308, "fraction": 0.3}, {"clients": 10}
    run = simulate(
        method={"name": "c-pfl", "tune_epochs": 1},
        attack=attack,
        data=data,
        detectors=["norm"],
        train={"rounds": 2},
    )
    scored, told = run.table("committee/accuracy"), run.store.arrays(1)
    assert (told["verdict/ids"].numel() > told["verdict/tables/committee/ids"].numel()) and not scored[
        "malicious"
    ].any()
    norms = run.table("turned-away")
    assert set(norms.loc[norms["how"] == "banned", "client"]) <= set(run.malicious())

    run = simulate(method="fedas", attack=attack, data=data, detectors=["norm"], train={"rounds": 1})
    assert len(run.store.arrays(1)["verdict/tables/fim"]) == 10 and len(run.table("fim")) == 10 - len(
        run.malicious()
    )

    run = simulate(method="fedcom", data=data, train={"rounds": 1})
    assert run.final["seconds/server/match"] == pytest.approx(run.metrics["seconds/server/match"].sum())
    assert 0 < run.final["seconds/server/match"] < run.final["seconds/server"]

    run = simulate(method="fedcap", data=data, train={"rounds": 2})
    sent = run.table("norms/sent").set_index(["round", "client"])["value"]
    first = run.table("norms").set_index(["round", "client"])["value"]
    assert (sent[1] == first[1]).all() and (
        sent[2] != first[2]
    ).all()  # in the first round everybody is sent the reference


def test_the_most_informative_parameters_matter_to_somebody(simulate: Callable[..., Run]) -> None:
    run = simulate(train={"rounds": 2})
    found = top_fim(run, share=1.0)
    assert (found.frame["top"] == found.frame["random"]).all()  # all of them, either way
    assert [one.label for one in found.figures[0].series] == [
        "as trained",
        "100 % at random",
        "top 100 % by FIM",
    ]
    assert found.short["client"].iloc[-1] == "mean" and found.short["before"].iloc[-1] == pytest.approx(
        found.frame["before"].mean()
    )
