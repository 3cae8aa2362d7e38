from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.engine import client_task
from holdfast.evaluation import evaluate, scores
from holdfast.evaluation.evaluate import score
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.helpers import LOOP, VMAP, deal, network_of, random_samples, starts

COUNTS = [7, 0, 30, 1, 5, 9, 3, 12]
SAMPLES = random_samples(80)
DATA = deal(SAMPLES, COUNTS)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def plain(net: nn.Module, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
    return net(x)


def models(network: Network, n: int) -> Tensor:
    """Start models whose running statistics are not those of a fresh module."""
    bank = starts(network, n)
    bank[:, network.layout.under("1.running_mean")] = Key(1).normal(n, 6, dtype=torch.float64)
    bank[:, network.layout.under("1.running_var")] = 1 + Key(2).uniform(n, 6, dtype=torch.float64)
    return bank


def slow(network: Network, bank: Tensor, which: Tensor) -> tuple[list[int], list[float]]:
    correct, loss = [], []
    for i, count in enumerate(COUNTS):
        module = network.load(bank[which[i]], dtype=torch.float64).eval()
        x, y = SAMPLES.batch(DATA.rows[i, :count], torch.float64), DATA.labels[i, :count]
        with torch.no_grad():
            logits = module(x)
        correct.append(int((logits.argmax(1) == y).sum()))
        loss.append(float(F.cross_entropy(logits, y, reduction="sum")) if count else 0.0)
    return correct, loss


PATHS = {
    "one by one": (LOOP, torch.arange(8)),
    "one model, one by one": (LOOP, torch.zeros(8, dtype=torch.int64)),
    "by model": (VMAP, torch.zeros(8, dtype=torch.int64)),
    "two models": (VMAP, torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])),
    "stacked": (VMAP, torch.arange(8)),
    "stacked in chunks": (Plan("vmap", rows=3), torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at_once", [1024, 4])
def test_all_paths_equal_a_slow_reference(path: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_SAMPLES_AT_ONCE", {"cpu": at_once})
    network, (plan, which) = network_of(make), PATHS[path]
    bank = models(network, int(which.max()) + 1)
    got = score(network, plain, bank, which, SAMPLES, DATA, plan)
    correct, loss = slow(network, bank, which)
    assert got.correct.tolist() == correct and got.total.tolist() == COUNTS
    torch.testing.assert_close(got.loss, torch.tensor(loss, dtype=torch.float64), rtol=0, atol=1e-10)


def test_the_intended_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("_one_by_one", "_by_model", "_stacked"):
        monkeypatch.setattr(evaluate, name, lambda *a, name=name: taken.append(name))
    network = network_of(make)
    for plan, which in PATHS.values():
        score(network, plain, models(network, int(which.max()) + 1), which, SAMPLES, DATA, plan)
    assert taken == ["_one_by_one", "_one_by_one", "_by_model", "_by_model", "_stacked", "_stacked"]


def test_a_broken_model_is_wrong() -> None:
    """argmax of NaN is class 0, which is often right: it must not count."""
    network = network_of(make)
    bank = models(network, 8)
    bank[:] = float("nan")
    for plan, which in PATHS.values():
        got = score(network, plain, bank, which, SAMPLES, DATA, plan)
        assert got.correct.sum() == 0 and torch.isnan(got.loss[torch.tensor(COUNTS) > 0]).all()
    infinite = torch.tensor([[float("inf"), 0.0, 0.0]])
    assert not scores.judge(infinite, torch.tensor([0]))[0].any()


@pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
def test_predict_sees_its_own_clients_tensors(plan: Plan) -> None:
    """Answers shifted by each client's own offset; the model itself is shared."""
    network = network_of(make)
    bank, which = models(network, 1), torch.zeros(8, dtype=torch.int64)
    offset = Key(5).normal(8, 3, dtype=torch.float64) * 10

    def shifted(net: nn.Module, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        return net(x) * 0 + aux["offset"]

    got = score(network, shifted, bank, which, SAMPLES, DATA, plan, {"offset": offset})
    expected = [int((DATA.labels[i, :count] == offset[i].argmax()).sum()) for i, count in enumerate(COUNTS)]
    assert got.correct.tolist() == expected


def test_scoring_leaves_the_module_in_the_mode_it_was_in_and_the_models_alone() -> None:
    network = network_of(make)
    bank = models(network, 8)
    before = bank.clone()
    for training in (True, False):
        network.module.train(training)
        for plan, which in PATHS.values():
            score(network, plain, bank, which, SAMPLES, DATA, plan)
            assert network.module.training is training
    assert torch.equal(bank, before)


def test_no_clients_give_empty_scores() -> None:
    network, nobody = network_of(make), torch.zeros(0, dtype=torch.int64)
    for plan in (LOOP, VMAP):
        got = score(network, plain, models(network, 1), nobody, SAMPLES, deal_nobody(), plan)
        assert len(got.correct) == len(got.loss) == len(got.total) == 0


def deal_nobody() -> Any:
    return type(DATA)(DATA.rows[:0], DATA.labels[:0], DATA.count[:0])


# ---- the protocol of a run


def accuracies(run: Run, table: str = "test") -> dict[int, float]:
    """Each client's accuracy with the exported model, computed by hand."""
    federation, out = run._experiment.federation, {}
    for client in range(federation.clients):
        rows, labels = getattr(federation, table).client(0 if table == "global_test" else client)
        with torch.no_grad():
            logits = run.model(client=client).double()(federation.samples.batch(rows, torch.float64))
        out[client] = float((logits.argmax(1) == labels).double().mean())
    return out


@pytest.mark.parametrize("clients", ["all", "cohort", "held-out"])
def test_which_clients_are_measured(clients: str, simulate: Callable[..., Run]) -> None:
    run = simulate(
        method="fedavg-ft",
        data={"clients": 6, "held_out": 2},
        train={"participation": 0.5},
        evaluate={"clients": clients},
    )
    held_out, frame = set(run._experiment.federation.held_out), run.clients()
    cohort = set(run.store.arrays(2)["cohort"].tolist())
    expected = {"all": set(range(6)) - held_out, "cohort": cohort, "held-out": held_out}[clients]
    assert set(frame.client) == expected and len(cohort) == 2 and cohort.isdisjoint(held_out)
    by_hand = accuracies(run)
    assert dict(zip(frame.client, frame["accuracy/personal"], strict=True)) == pytest.approx(
        {c: by_hand[c] for c in expected}
    )
    assert run.final["accuracy"] == pytest.approx(sum(by_hand[c] for c in expected) / len(expected))


def test_malicious_clients_never_count_but_are_measured_where_asked(
    simulate: Callable[..., Run], forget: None
) -> None:
    from holdfast.attacks.base import Attack

    attack = Attack(clients=(1, 3))
    everyone = simulate(attack=attack)
    benign = simulate(attack=attack, evaluate={"clients": "benign"})
    assert everyone.clients().client.tolist() == [0, 1, 2, 3, 4] and benign.clients().client.tolist() == [
        0,
        2,
        4,
    ]
    by_hand = accuracies(everyone)
    assert (
        everyone.final["accuracy"]
        == benign.final["accuracy"]
        == pytest.approx(sum(by_hand[c] for c in (0, 2, 4)) / 3)
    )
    assert everyone.final["detection/fnr"] == 1.0 and everyone.final["detection/dacc"] == pytest.approx(0.6)


def test_the_global_test_set(simulate: Callable[..., Run]) -> None:
    run = simulate(method="local", data={"pool": "train"}, evaluate={"test": "global"})
    samples = run._experiment.federation.samples
    assert run.clients().samples.tolist() == [len(samples) - samples.train_rows] * 5
    assert run.final["accuracy"] == pytest.approx(sum(accuracies(run, "global_test").values()) / 5)
    rows = run._experiment.federation.train.row
    assert int(rows.max()) < samples.train_rows  # nobody trains on it


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_a_model_that_all_share_is_tested_once_where_all_have_the_same_test_set(
    plan: str, simulate: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[int] = []

    def counted(*args: Any, **options: Any) -> scores.Score:
        tested.append(len(args[5].count))
        return score(*args, **options)

    monkeypatch.setattr(client_task, "score", counted)
    attack = {"name": "backdoor", "clients": [1], "size": 2}
    run = simulate(attack=attack, data={"pool": "train"}, evaluate={"test": "global"}, engine={"plan": plan})
    assert tested == [1, 1] * 2  # the test set and its triggered copy, in two rounds
    assert run.clients()["accuracy/global"].tolist() == pytest.approx([accuracies(run, "global_test")[0]] * 5)


def test_validation_selects_a_round(simulate: Callable[..., Run]) -> None:
    run = simulate(
        data={"split": {"train": 0.5, "validation": 0.25, "test": 0.25}}, train={"rounds": 6, "lr": 0.5}
    )
    metrics = run.metrics
    best = metrics["validation/accuracy"].idxmax()  # the first of the best
    assert run.final["accuracy/selected"] == metrics["accuracy"][best]
    by_hand = accuracies(run, "validation")
    assert run.final["validation/accuracy"] == pytest.approx(sum(by_hand.values()) / 5)


def test_last_and_best_accuracy_and_rounds_to_targets(simulate: Callable[..., Run]) -> None:
    run = simulate(train={"rounds": 5, "lr": 0.5}, evaluate={"every": 2, "targets": [0.0, 1.0]})
    assert run.metrics["accuracy"].notna().tolist() == [
        False,
        True,
        False,
        True,
        True,
    ]  # the last round always is
    seen = run.metrics["accuracy"].dropna()
    assert run.final["accuracy"] == seen.iloc[-1] and run.final["accuracy/best"] == seen.max()
    assert run.final["accuracy/last10"] == pytest.approx(seen.mean())
    assert run.final["rounds_to/0.00"] == 2 and run.final["rounds_to/1.00"] is None
    with pytest.raises(Exception, match="round 3 was not evaluated"):
        run.clients(3)


def test_only_the_models_asked_for_are_measured(simulate: Callable[..., Run]) -> None:
    run = simulate(method="ditto", evaluate={"models": ["global"]})
    assert run.final["accuracy"] is None and run.final["accuracy/personal"] is None
    assert (
        run.final["accuracy/global"]
        == run.final["accuracy/better_of"]
        == simulate(method="ditto").final["accuracy/global"]
    )
    assert (
        run.final["accuracy/tacc"] is None and run.final["accuracy/tacc/pooled"] is None
    )  # the other model was not measured


def test_the_protocol_is_part_of_the_result(simulate: Callable[..., Run]) -> None:
    run = simulate(method="ditto", evaluate={"unselected": "deliver", "clients": "cohort"})
    result = run.store.read_json("result.json")
    assert result is not None
    protocol = result["protocol"]
    assert (
        protocol["unselected"] == "deliver"
        and protocol["clients"] == "cohort"
        and protocol["test"] == "per-client"
    )
    assert protocol["models"] == ["global", "personal"] and protocol["deployed"] == "personal"


class Writing(nn.Module):
    """Writes to its own tensors while it is measured, as an embedding with max_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
        return self.fc(x)


@pytest.mark.parametrize("path", ["one by one", "by model"])
def test_measuring_a_module_that_writes_leaves_the_model_alone(path: str) -> None:
    plan, which = PATHS[path]
    network = network_of(Writing)
    bank = starts(network, 8)
    before = bank.clone()
    score(network, plain, bank, which, SAMPLES, DATA, plan)
    assert torch.equal(bank, before)


def test_where_memory_is_short_fewer_samples_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, sizes = network_of(make), []
    bank, which = models(network, 8), torch.arange(8)

    def hungry(net: nn.Module, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        sizes.append(len(x))
        if len(x) > 6:
            raise torch.OutOfMemoryError("too much")
        return net(x)

    got, want = (
        score(network, hungry, bank, which, SAMPLES, DATA, LOOP),
        score(network, plain, bank, which, SAMPLES, DATA, LOOP),
    )
    assert max(sizes) > 6 and torch.equal(got.correct, want.correct) and torch.equal(got.total, want.total)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-12)


# ---- late joiners


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft", "local", "fedcap"])
def test_held_out_clients_are_measured_as_late_joiners(method: str, simulate: Callable[..., Run]) -> None:
    """Whoever is measured, and nothing of it is kept: the run is the same as one that measures them instead
    of the members."""
    data = {"clients": 6, "held_out": 2}
    run, other = (
        simulate(method=method, data=data, evaluate={"clients": who}) for who in ("all", "held-out")
    )
    late, members = run.clients(late=True), run.clients()
    assert set(late.client) == set(run._experiment.federation.held_out) and set(late.client).isdisjoint(
        members.client
    )
    kind = run._experiment.method.deploys
    assert (
        run.final["accuracy/late"]
        == pytest.approx(late[f"accuracy/{kind}"].mean())
        == run.final[f"accuracy/late/{kind}"]
    )
    assert run.final["accuracy"] == pytest.approx(members[f"accuracy/{kind}"].mean())
    assert other.final["accuracy"] == other.final["accuracy/late"] == run.final["accuracy/late"]
    assert run.final["bytes/up"] == other.final["bytes/up"] and (run.metrics["accuracy/late"] >= 0).all()
    for client in late.client:
        module = run.model(client=int(client)).double()
        rows, labels = run._experiment.federation.test.client(int(client))
        with torch.no_grad():
            right = (
                (module(run._experiment.federation.samples.batch(rows, torch.float64)).argmax(1) == labels)
                .double()
                .mean()
            )
        assert float(right) == pytest.approx(
            float(late.loc[late.client == client, f"accuracy/{kind}"].iloc[0])
        )


def test_without_held_out_clients_there_are_no_late_joiners(simulate: Callable[..., Run]) -> None:
    run = simulate()
    assert run.final["accuracy/late"] is None and "accuracy/late" not in run.metrics
    with pytest.raises(ConfigError, match="no client was held out; set data.held_out"):
        run.clients(late=True)
