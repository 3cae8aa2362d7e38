"""What a method declares beyond the common, the loop, results and deploy read: no other file names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.types import Round, State, Verdict
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import FinishedRun, Method
from holdfast.methods.context import Context
from holdfast.methods.fedavg import FedAvgClient
from holdfast.results.run import Run
from holdfast.results.tables import DeclaredTables


class Client(FedAvgClient):
    tasks = frozenset({"train", "greet"})
    quiet = frozenset({"greet"})

    def schema(self, task: str, wire: Any) -> Any:
        return {} if task == "greet" else super().schema(task, wire)

    def greet(self, local: Any, state: State, received: Any, extra: Any) -> tuple[None, dict[str, Tensor]]:
        return None, {}


class Server(Averaging):
    def round(self, state: State, ctx: Context) -> Round:
        yield ctx.ask("greet", to=ctx.available)
        state, verdict = yield from super().round(state, ctx)
        tables = {**verdict.tables, "luck": torch.arange(len(verdict.ids)).double()}
        return state, Verdict(verdict.ids, verdict.weights, tables=tables)


def largest(run: FinishedRun) -> float:
    """Return the largest entry of the model."""
    return float(run.server_state()["model"].max())


@pytest.fixture
def declared(forget: None) -> type[Method]:
    @holdfast.register("method", "test-declared")
    class Declared(Method):
        """Declares all that a method can."""

        Client, Server = Client, Server
        tables = {"luck": RecordedTable("luck of each client", title="Luck", share=True)}
        results = {"largest": largest}

        def round_figures(
            self, verdict: Verdict, facts: Mapping[str, Tensor], benign: Tensor
        ) -> dict[str, float | None]:
            return {"luck": float(verdict.tables["luck"].sum())}

    return Declared


def test_a_quiet_task_does_not_count_as_taking_part(declared: Any, simulate: Callable[..., Run]) -> None:
    run = simulate(method="test-declared", data={"clients": 6}, train={"participation": 0.5})
    arrays = run.store.arrays(1)
    assert arrays["took_part"].tolist() == arrays["cohort"].tolist() and len(arrays["cohort"]) == 3
    assert run.store.parts(1)[0]["metrics"]["cohort"] == 6  # all were asked


def test_its_figures_are_in_the_rounds_metrics(declared: Any, simulate: Callable[..., Run]) -> None:
    run = simulate(method="test-declared", data={"clients": 4})
    assert run.metrics["luck"].tolist()[-1] == 0 + 1 + 2 + 3


def test_its_tables_have_its_words(declared: Any, simulate: Callable[..., Run]) -> None:
    run = simulate(method="test-declared")
    assert run.tables["luck"] == "luck of each client"
    assert run.declared_tables.share("luck") and run.declared_tables.title("luck") == "Luck"
    assert run.declared_tables.about("unknown") == "recorded by the method or a detector"


def test_its_results_are_methods_of_its_runs(declared: Any, simulate: Callable[..., Run]) -> None:
    run = simulate(method="test-declared")
    assert run.largest() == float(run.vector().max())
    with pytest.raises(AttributeError, match="has no attribute 'smallest'"):
        run.smallest()


def test_where_two_methods_record_a_table_of_the_same_name_the_runs_method_counts() -> None:
    assert "t-FIM" in DeclaredTables("fedas").about("alpha")
    assert "head" in DeclaredTables("fedpac").about("alpha")


def test_the_tables_of_a_second_detector_are_found() -> None:
    tables = DeclaredTables()
    assert tables.kind("committee-2/votes") == tables.kind("committee/votes") == "votes"
    assert tables.kind("norm/ids") == "ids" and tables.find("other/votes") is None
