"""The map of defences: which cells it has, what it counts, what it says, and that the page belongs to the
record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import defences
from benchmarks.defence_map import axes, claims, facts, page, record
from benchmarks.defence_map.measured import decisions, of_spared
from benchmarks.defence_map.record import Found, Record
from benchmarks.defence_map.scales import SCALES, cells
from holdfast.experiment.config import make_config
from holdfast.results.run import Run
from tests.helpers import built_in

MEAN, LIE = Found((80.0, 82.0)), Found((70.0, 74.0), dacc=70.0, fpr=10.0, fnr=80.0)


def of(cells: Mapping[tuple[str, str], Found], groups: Mapping[str, str]) -> Record:
    """A record of one dataset, "d"."""
    head: dict[str, Any] = {
        "data": {"d": {"data": {}, "model": "mlp", "seconds": 30}},
        "defences": {name: {"kind": "rule", "part": name} for name, _ in cells},
        "attacks": {name: {"group": group} for name, group in {"none": "none", **groups}.items()},
    }
    return Record(head, {("d", *names): found for names, found in cells.items()})


SMALL = of(
    {
        ("mean", "none"): MEAN,
        ("mean", "lie"): LIE,
        ("mean", "ipm"): Found((40.0, 41.0), note="diverged in round 2"),
        ("mean", "badnets"): Found((79.0, 79.0), (60.0, 50.0)),
        ("median", "none"): Found((60.0, 64.0)),
        ("median", "lie"): Found((57.0, 57.0)),
        ("median", "ipm"): Found((31.0, 31.0)),
        ("median", "badnets"): Found((62.0, 62.0), (10.0, 20.0)),
    },
    {"lie": "others", "ipm": "others", "badnets": "backdoor"},
)


def test_every_part_is_on_an_axis_and_every_cell_is_a_sound_config() -> None:
    rows, columns = axes.defences(SCALES["small"].parts), axes.attacks(SCALES["small"].parts)
    assert {one.part for one in rows if one.kind == "rule"} == set(built_in("aggregator"))
    assert {one.part for one in rows if one.kind == "wrapper"} == set(built_in("wrapper"))
    assert {one.part for one in rows if one.kind == "detector"} == set(built_in("detector"))
    assert {one.name for one in columns} == {"none", *built_in("attack")}
    assert (
        len({one.name for one in rows}) == len(rows) and rows[0].name == "mean" and columns[0].name == "none"
    )
    for data in SCALES["small"].data:
        pairs = [(rows[0], attack) for attack in columns] + [(row, columns[0]) for row in rows]
        for row, attack in pairs:
            make_config(cells(SCALES["small"], data, attack, [row])[0].table).parts()


def test_a_cell_is_named_by_all_its_settings() -> None:
    row, attack = axes.defences()[0], axes.attacks()[0]
    one, other = (cells(SCALES["small"], data, attack, [row])[0] for data in ("fashion-mnist", "uci-har"))
    again = cells(SCALES["small"], "uci-har", attack, [row])[0]
    assert one.digest != other.digest == again.digest


def test_decisions_count_every_client_in_every_round() -> None:
    """Clients 0 and 1 attack, of four. Round 1 rejects 0 and 3, round 2 bans 1, round 3 rejects nobody."""
    found = decisions([({0, 3}, set()), (set(), {1}), (set(), set())], clients=4, malicious={0, 1})
    assert found == (6, 3, 6, 1)
    assert found.rates() == {"dacc": 100 * (3 + 5) / 12, "fpr": 100 / 6, "fnr": 50.0}
    honest = decisions([({3}, set())], clients=4, malicious=set())
    assert honest.rates() == {"dacc": None, "fpr": 25.0, "fnr": None}


def test_without_attack_the_clients_count_that_are_benign_under_attack(simulate: Callable[..., Run]) -> None:
    honest, attacked = (
        simulate(method="fedavg", seed=3, data={"clients": 7}, train={"rounds": 1}, attack=attack)
        for attack in (None, {"name": "lie", "fraction": axes.F})
    )
    clients, bad = honest.clients(), attacked.malicious()
    benign = clients[~clients["client"].isin(bad)]
    assert len(bad) == 2 and of_spared(honest) == benign["accuracy/global"].mean()
    assert benign["accuracy/global"].mean() != clients["accuracy/global"].mean()


def test_what_a_defence_keeps_and_what_it_falls_to() -> None:
    mean, median = facts.outcome(SMALL, "d", "mean"), facts.outcome(SMALL, "d", "median")
    assert (mean.base, mean.keeps, mean.loses, mean.falls) == (81.0, ("badnets",), ("lie", "ipm"), ())
    assert mean.through == ("badnets",) and mean.worst == (40.5, "ipm") and mean.measured == 3
    assert median.keeps == ("lie", "badnets") and median.falls == () and median.stopped == ("badnets",)


def test_half_of_its_accuracy_is_not_yet_below_half() -> None:
    assert not facts.falls(81.0, 40.5) and facts.falls(81.0, 40.4)
    assert facts.keeps(81.0, 76.0) and not facts.keeps(81.0, 75.9)


def test_the_spread_of_seeds_is_that_of_what_attacks_cost() -> None:
    """mean loses 10 and 8 under lie, 40 and 41 under ipm, 1 and 3 under badnets; median 3 and 7, 29 and 33,
    -2 and 2."""
    assert facts.seed_spread(SMALL) == 3.0


def test_what_an_attack_does_in_words() -> None:
    assert facts.attacking(SMALL).splitlines() == [
        "* `lie`: on d 1 of 2 keep their accuracy, none falls below half.",
        "* `ipm`: on d 0 of 2 keep their accuracy, none falls below half.",
        "* `badnets`: on d 2 of 2 keep their accuracy, none falls below half; it comes through 1 of 2.",
    ]


def test_what_a_defence_does_in_words() -> None:
    first, second = facts.falling(SMALL).splitlines()
    assert first == (
        "* `mean` (81 on d without attack) keeps its accuracy under 1 of 3 attacks on d; never falls"
        " below half; its lowest is 40 under `ipm` on d; lets through on d `badnets`."
    )
    assert second.startswith("* `median` (62 on d without attack) keeps its accuracy under 2 of 3 attacks")


@pytest.mark.parametrize(
    ("check", "verdict", "measured"),
    [
        ({"kind": "keeps", "defence": "median", "attacks": ["lie"]}, "holds", "lie: 57 of 62"),
        ({"kind": "keeps", "defence": "mean", "attacks": ["lie"]}, "does not hold", "lie: 72 of 81"),
        ({"kind": "keeps", "defence": "mean", "attacks": ["lie"], "points": 9}, "holds", "lie: 72 of 81"),
        ({"kind": "loses", "defence": "mean", "attacks": ["lie"]}, "holds", "lie: 72 of 81"),
        ({"kind": "falls", "defence": "mean", "attacks": ["ipm"]}, "does not hold", "ipm: 40 of 81"),
        (
            {"kind": "beats", "defence": "median", "than": "mean", "attacks": ["lie"]},
            "does not hold",
            "lie: 57, `mean` 72",
        ),
        (
            {"kind": "harder", "defences": ["mean", "median"], "than": "lie", "attacks": ["ipm"]},
            "holds",
            "mean, ipm: 40, under `lie` 72; median, ipm: 31, under `lie` 57",
        ),
        (
            {"kind": "keeps", "defence": "median", "attacks": ["lie", "ipm"]},
            "holds in part",
            "lie: 57 of 62, yes; ipm: 31 of 62, no",
        ),
        (
            {"kind": "asr-beats", "defence": "mean", "than": "badnets", "attacks": ["badnets"]},
            "holds",
            "badnets: ASR 55, of `badnets` 55",
        ),
        (
            {"kind": "asr-below", "defence": "median", "value": 20, "attacks": ["group:backdoor"]},
            "holds",
            "badnets: ASR 15",
        ),
        (
            {"kind": "asr-above", "defence": "mean", "value": 55, "attacks": ["badnets"]},
            "does not hold",
            "badnets: ASR 55",
        ),
        (
            {"kind": "detects", "defence": "mean", "value": 60, "fpr": 5, "attacks": ["lie"]},
            "does not hold",
            "lie: DAcc 70, FPR 10",
        ),
        ({"kind": "keeps", "defence": "mean", "attacks": ["gone"]}, "not tested", "not measured: gone"),
        ({"kind": "untested", "reason": "too few rounds"}, "not tested", "too few rounds"),
    ],
)
def test_a_claim_is_judged(check: dict[str, Any], verdict: str, measured: str) -> None:
    assert claims.verdict(SMALL, "d", check) == (verdict, measured)


def test_every_claim_names_a_part_and_a_kind_of_check() -> None:
    known = {*built_in("aggregator"), *built_in("wrapper"), *built_in("detector"), *built_in("attack")}
    rows = {one.name for one in axes.defences()}
    for claim in claims.read():
        assert claim.keys() == {"part", "paper", "says", "check"} and claim["part"] in known, claim
        check = claim["check"]
        assert check["kind"] in (*claims.KINDS, "untested") and claim["says"][-1] != "."
        named = [*check.get("defences", [])] + ([check["defence"]] if "defence" in check else [])
        assert {*named} <= rows, claim
        attacks = {name for name in check.get("attacks", ()) if not name.startswith("group:")}
        assert attacks <= {"none", *built_in("attack")}, claim


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record.write(SMALL, tmp_path)
    assert record.read(tmp_path) == SMALL
    lines = (tmp_path / "defences.csv").read_text().splitlines()
    assert lines[1] == "d,mean,none,80.0 82.0,,,,,,,"
    assert lines[2] == "d,mean,lie,70.0 74.0,,70.0,10.0,80.0,,,"


def test_seeds_become_one_line() -> None:
    rows = [
        {
            "seed": 1,
            "accuracy": 50.0,
            "asr": None,
            "dacc": 70.0,
            "fpr": 0.0,
            "fnr": 100.0,
            "auc": 0.4,
            "ms": 3.0,
        },
        {
            "seed": 0,
            "accuracy": 40.0,
            "asr": None,
            "dacc": 80.0,
            "fpr": 0.0,
            "fnr": 50.0,
            "auc": 0.6,
            "ms": 1.0,
        },
        {"seed": 2, "note": "failed in round 1: it is broken"},
    ]
    assert record.joined(rows) == Found(
        (40.0, 50.0), (), 75.0, 0.0, 75.0, 0.5, 2.0, "failed in round 1: it is broken"
    )


def test_the_page_belongs_to_the_record() -> None:
    text = page.PAGE.read_text()
    assert page.updated(text, page.sections(record.read())) == text, (
        "run python -m benchmarks.defences --docs"
    )


def test_a_map_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell that cannot be built is noted and the others go on; the second call has nothing left to do; a
    new defence costs its own cells."""
    monkeypatch.setattr(axes, "SETTINGS", {"attack": {"backdoor": {"size": 50}}})
    call = [
        "--scale",
        "try",
        "--out",
        str(tmp_path),
        "--processes",
        "1",
        "--attacks",
        "sign-flip",
        "backdoor",
    ]
    defences.main([*call, "--defences", "krum", "norm"])
    said = capsys.readouterr().out
    assert "9 cells in 3 blocks" in said
    found = record.read(tmp_path)
    assert found.head["scale"] == "try" and list(found.defences) == ["mean", "krum", "norm + mean"]
    held, lost = (found.at("digits", "mean", attack) for attack in ("none", "sign-flip"))
    assert held.accuracy and lost.accuracy and lost.dacc == 75.0 and lost.fnr == 100.0
    assert found.at("digits", "krum", "none").fpr == 87.5
    assert "does not fit" in found.at("digits", "mean", "backdoor").note
    assert not list(tmp_path.glob("digits/*/")), "the folders of sweeps are removed"
    text = (tmp_path / "defences.md").read_text()
    assert "| `krum` |" in text and "a patch of 50 pixels does not fit" in text
    assert (tmp_path / "img" / "defences-digits.png").stat().st_size > 1_000
    before = json.loads((tmp_path / "digits" / "sign-flip.json").read_text())
    defences.main([*call, "--defences", "krum", "norm", "median"])
    assert "3 cells in 3 blocks" in capsys.readouterr().out
    after = json.loads((tmp_path / "digits" / "sign-flip.json").read_text())
    assert before["rows"].items() <= after["rows"].items() and len(after["rows"]) == 4
