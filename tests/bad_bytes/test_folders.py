"""Damaged and hostile files of a sweep, a reproduction and a tracked run, and tensors of a run directory: one
line that names the file or the folder, no traceback, no hang."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.experiment.config import make_config
from holdfast.report.live import Lookout
from holdfast.report.page import write_page
from holdfast.report.read_runs import by_setting, not_begun, read_records
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.measures.fedcpa import _changes
from holdfast.reproduction.outcome import read_outcome, reproduce
from holdfast.reproduction.page import write_reproduction
from holdfast.reproduction.study import make
from holdfast.results.run import Run
from holdfast.storage.store import read_tensors, write_tensors
from holdfast.sweeps import session
from holdfast.sweeps.folder import SweepFolder, read_sweep
from holdfast.sweeps.grid import configs
from holdfast.sweeps.runner import resume_sweep
from holdfast.tracking.following import _read_record
from tests.bad_bytes.helpers import DEEP, JUNK, LONG, altered, broken, budget, limited, one_line
from tests.experiment.sessions import TINY
from tests.reproduction.conftest import SMALL


@pytest.fixture(autouse=True)
def _quick(quick_disk: None) -> None:
    """What is read is tested here, not what survives a loss of power."""


def never_a_traceback(read: Callable[[], Any]) -> None:
    try:
        with limited():
            read()
    except HoldfastError as error:
        one_line(error)


# ---- a sweep ----


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "sweep"
    session.start(configs({**TINY, "sweep": {"seed": [0, 1]}}), folder)
    return folder


@pytest.fixture
def sweep(swept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(swept, tmp_path / "sweep"))


def read_whole_sweep(folder: Path) -> None:
    """What sweep, resume, report and status read of a sweep's own files."""
    cells = read_sweep(folder)
    opened = SweepFolder(folder, cells)
    opened.check()
    opened.groups()
    SweepFolder(folder, configs({**TINY, "sweep": {"seed": [0, 1]}})).check()
    not_begun(read_records(folder))
    Lookout(folder).look()


GROUPS: list[Any] = [
    {},
    {"cells": []},
    {"cells": "ab"},
    {"cells": [["a"]]},
    {"cells": [{"a": 1}]},
    {"cells": ["x"]},
    {"plans": []},
    {"plans": 3},
    {"plans": [3, 3]},
    {"plans": [{"rows": "many"}] * 2},
    {"plans": [{"sizes": 7}] * 2},
    {"plans": [{"name": "magic"}] * 2},
    {"plans": [{"more": 1}] * 2},
    {"plans": [{"rows": -1}] * 2},
    {"plans": [{"workers": 10**9}] * 2},
    {"threads": 0},
    {"threads": 1.5},
    {"threads": "1"},
    {"threads": None},
    {"threads": 10**30},
    {"device": 3},
    {"device": "a\nb"},
    {"torch": None},
]


@pytest.mark.parametrize("change", GROUPS, ids=str)
def test_terms_of_a_group_that_cannot_be_used_are_one_line(sweep: Path, change: Any) -> None:
    (file,) = (sweep / "groups").glob("*.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **change} if change else {}))
    next(sweep.glob("*/result.json")).unlink()  # so that there is something left to run_all
    with pytest.raises(HoldfastError) as error:
        resume_sweep(sweep)
    one_line(error.value, "groups/000.json" if change != {"device": "a\nb"} else "")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", DEEP, b"null"], ids=range(5))
def test_a_group_that_is_no_json_is_one_line(sweep: Path, content: bytes) -> None:
    next((sweep / "groups").glob("*.json")).write_bytes(content)
    with pytest.raises(RunError) as error:
        SweepFolder(sweep, read_sweep(sweep)).groups()
    one_line(error.value, "groups/000.json")


@LONG
@pytest.mark.parametrize("name", ["sweep.json", "groups/000.json"])
def test_any_broken_value_of_a_sweep_is_one_line(sweep: Path, name: str, examples: int) -> None:
    good = json.loads((sweep / name).read_text())

    @budget(examples // 2)
    @given(broken(good))
    def check(content: Any) -> None:
        (sweep / name).write_text(json.dumps(content))
        never_a_traceback(lambda: read_whole_sweep(sweep))

    check()


def test_a_grid_of_more_cells_than_can_be_played_is_one_line() -> None:
    """A file of a few kilobytes may ask for any number of them."""
    many = {
        "seed": list(range(1000)),
        "train.lr": [n / 1000 for n in range(1, 1000)],
        "train.batch_size": list(range(1, 1000)),
    }
    with limited(mebibytes=64), pytest.raises(ConfigError) as error:
        configs({**TINY, "sweep": many})
    one_line(error.value, "sweep", "998,001,000 cells")


# ---- a reproduction ----

ASKED = {
    "study": SMALL,
    "wanted": {
        "scale": "smoke",
        "seeds": 1,
        "variant": "card",
        "only": [],
        "changes": [],
        "stand_ins": False,
    },
}


def read_whole_outcome(folder: Path) -> None:
    """What reproduce and report read of a reproduction's own files."""
    outcome = read_outcome(folder)
    outcome.claim_results, outcome.data, outcome.missing  # noqa: B018
    write_reproduction(outcome)


STUDIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no study": lambda c: c.pop("study"),
    "a study that is a list": lambda c: c.update(study=[]),
    "no key": lambda c: c["study"].pop("key"),
    "a key that is a number": lambda c: c["study"].update(key=3),
    "no wish": lambda c: c.pop("wanted"),
    "an empty wish": lambda c: c.update(wanted={}),
    "a wish of another name": lambda c: c["wanted"].update(more=1),
    "changes that are a number": lambda c: c["wanted"].update(changes=3),
    "changes of one word": lambda c: c["wanted"].update(changes=[["a"]]),
    "changes of no key": lambda c: c["wanted"].update(changes=[[1, 2]]),
    "labels that are none": lambda c: c["wanted"].update(only=[1]),
    "labels that are a number": lambda c: c["wanted"].update(only=1),
    "a scale that is a list": lambda c: c["wanted"].update(scale=["smoke"]),
    "a variant that is none": lambda c: c["wanted"].update(variant=None),
    "seeds that are a word": lambda c: c["wanted"].update(seeds="2"),
    "a billion seeds": lambda c: c["wanted"].update(seeds=10**9),
    "seeds of a half": lambda c: c["wanted"].update(seeds=1.5),
    "half a surrogate pair": lambda c: c["study"]["layout"].update(rows=["\ud800"]),
    "no metrics": lambda c: c["study"].update(metrics={}),
    "no axes": lambda c: c["study"].update(axes={}),
    "settings that are a number": lambda c: c["study"].update(config={"train": 3}),
    "a grid of 10**12": (
        lambda c: c["study"]["axes"].update({f"x{n}": {f"{i}": {} for i in range(1000)} for n in range(4)})
    ),
}


@pytest.mark.parametrize("change", STUDIES.values(), ids=STUDIES)
def test_a_study_on_disk_that_cannot_be_used_is_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    content = copy.deepcopy(ASKED)
    change(content)
    (tmp_path / "study.json").write_text(json.dumps(content))
    for read in (
        lambda: read_whole_outcome(tmp_path),
        lambda: reproduce(make(SMALL), StudyRequest(scale="smoke"), tmp_path),
    ):
        with limited(), pytest.raises(HoldfastError) as error:
            read()
        one_line(error.value, str(tmp_path))


@LONG
def test_any_broken_value_of_a_study_is_one_line(tmp_path: Path, examples: int) -> None:
    @budget(examples // 2)
    @given(broken(ASKED))
    def check(content: Any) -> None:
        (tmp_path / "study.json").write_text(json.dumps(content))
        never_a_traceback(lambda: read_whole_outcome(tmp_path))

    check()


@LONG
def test_any_broken_data_of_a_reproduction_are_one_line(tmp_path: Path, examples: int) -> None:
    data = {
        "data": [
            {"dataset": "digits", "clients": 6, "rounds": 2, "participation": 1.0, "samples": 10, "of": 20}
        ]
    }
    (tmp_path / "study.json").write_text(json.dumps(ASKED))

    @budget(examples // 2)
    @given(broken(data))
    def check(content: Any) -> None:
        (tmp_path / "data.json").write_text(json.dumps(content))
        never_a_traceback(lambda: read_whole_outcome(tmp_path))

    check()


@pytest.mark.parametrize("seeds", [10**9, 10**30])
def test_too_many_seeds_are_refused_in_one_line(seeds: int) -> None:
    with limited(), pytest.raises(ConfigError, match="experiments are more than the limit"):
        StudyGrid(make(SMALL), StudyRequest(scale="smoke", seeds=seeds))


# ---- figures and tensors of a run ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "run"
    session.start([("", make_config({**TINY, "train": {**TINY["train"], "rounds": 1}}))], folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"a,b\n1,2\n",
        b"place,benign,disparity\n1,2,3\n1,2,3,4,5\n",
        b"place,benign,disparity\nx,y,z\n",
    ],
    ids=range(5),
)
def test_figures_kept_beside_a_run_that_are_damaged_are_one_line(run: Path, content: bytes) -> None:
    (run / "rank-change.csv").write_bytes(content)
    with pytest.raises(RunError) as error:
        _changes(Run(run))
    one_line(error.value, "rank-change.csv", "remove it")


@pytest.mark.parametrize(
    "content",
    [
        {"mlflow": {"id": "x", "round": -(10**9)}},
        {"mlflow": {"id": "x", "round": True}},
        {"mlflow": {"id": [], "round": 1}},
        {"mlflow": {"round": 1}},
        {"mlflow": 3},
        {"mlflow": {"id": "x", "round": 10**30}},
        {"mlflow": {"id": "x", "round": "1"}},
    ],
    ids=str,
)
def test_a_damaged_record_of_what_was_tracked_begins_anew(tmp_path: Path, content: Any) -> None:
    """Below 0 it would be billions of rounds to be told again."""
    (tmp_path / "tracking.json").write_text(json.dumps(content))
    assert _read_record(tmp_path) == {}


def read_tensors_of(folder: Path) -> None:
    """What report, diagnose, export and resume read of them."""
    found = Run(folder)
    for name in found.tables:
        found.table(name)
    found.clients()
    for line in by_setting(read_records(folder)):
        line.dots()
    found.vector(0)
    found.vector(1, "global")
    write_page(folder, folder.parent / "page.html")


def resumed(folder: Path) -> None:
    (folder / "result.json").unlink(missing_ok=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"]["train"]["rounds"] = 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    session.resume(folder)


def changed_tensor(value: torch.Tensor, how: str) -> torch.Tensor:
    return {
        "none": value[:0],
        "short": value[:-1],
        "long": torch.cat([value, value]),
        "flat": value.reshape(-1),
        "deep": value[None],
        "double": value.double(),
        "half": value.half(),
        "whole": value.long(),
        "truth": value.bool(),
        "nan": value.double() * torch.nan,
        "below 0": -1 - value.long(),
        "far": value.long() + 10**12,
        "a number": torch.tensor(7),
        "complex": value.to(torch.complex64),
    }[how]


HOW = [
    "missing",
    "none",
    "short",
    "long",
    "flat",
    "deep",
    "double",
    "half",
    "whole",
    "truth",
    "nan",
    "below 0",
    "far",
    "a number",
    "complex",
]


@LONG
@pytest.mark.parametrize("name", ["state/000001.safetensors", "parts/000001.safetensors"])
def test_any_broken_tensor_of_a_run_is_one_line(run: Path, tmp_path: Path, name: str, examples: int) -> None:
    good = read_tensors(run / name)

    @budget(examples // 10)
    @given(st.sampled_from(sorted(good)), st.sampled_from(HOW))
    def check(which: str, how: str) -> None:
        tensors = {n: v for n, v in good.items() if n != which}
        if how != "missing":
            tensors[which] = changed_tensor(
                good[which].clone() if good[which].ndim else good[which].reshape(1), how
            )
        write_tensors(run / name, tensors)
        never_a_traceback(lambda: read_tensors_of(run))
        again = shutil.copytree(run, tmp_path / "again")
        try:
            never_a_traceback(lambda: resumed(again))
        finally:
            shutil.rmtree(again)

    check()


@LONG
def test_any_bytes_of_private_rows_are_read_or_one_line(run: Path, examples: int) -> None:
    good = (run / "rows" / "records").read_bytes()

    @budget(examples // 5)
    @given(altered(good) | st.binary(max_size=40))
    def check(content: bytes) -> None:
        (run / "rows" / "records").write_bytes(content)
        never_a_traceback(lambda: Run(run).vector(0))

    check()


JUNK_FIELDS = st.dictionaries(
    st.sampled_from(["dtype", "shape", "more"]),
    JUNK | st.sampled_from(["float32", [3], [2**40], [2**20] * 3]),
)


@LONG
def test_any_layout_of_private_rows_is_read_or_one_line(run: Path, examples: int) -> None:
    good = json.loads((run / "rows" / "fields.json").read_text())

    @budget(examples // 5)
    @given(
        broken(good)
        | st.fixed_dictionaries({"fields": st.dictionaries(st.text(max_size=3), JUNK_FIELDS, max_size=3)})
    )
    def check(content: Any) -> None:
        (run / "rows" / "fields.json").write_text(json.dumps(content))
        never_a_traceback(lambda: Run(run).vector(0))

    check()
