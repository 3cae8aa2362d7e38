"""[privacy] in simulations: what honest clients send, what it costs, who stops, and what attackers do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")

from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.experiment.runner import RunCallbacks  # noqa: E402
from holdfast.models.own_module import Model  # noqa: E402
from holdfast.privacy import accounting  # noqa: E402
from holdfast.privacy.accounting import epsilon_of  # noqa: E402
from holdfast.results.run import Run  # noqa: E402
from holdfast.sweeps import session  # noqa: E402
from tests.helpers import assert_same, everything, tiny  # noqa: E402

One, All = Callable[..., Run], Callable[..., list[Run]]
ONCE: dict[str, Any] = {"rounds": 1, "local_epochs": 1}


def norms(run: Run, round: int = 1) -> torch.Tensor:
    return run.store.arrays(round)["verdict/tables/norms"]


def test_long_updates_are_clipped_and_short_ones_are_not(simulate: One) -> None:
    plain = norms(simulate(train=ONCE))
    clip = float(plain.median())
    private = simulate(train=ONCE, privacy={"clip": clip, "noise": 0.0})
    torch.testing.assert_close(norms(private), plain.clamp(max=clip))
    assert private.final["accuracy"] > 0 and private.final["privacy/epsilon"] is None  # no noise


def test_other_fields_are_withheld_or_sent_as_by_a_node(simulate: One) -> None:
    bare = {"clip": 1e6, "noise": 0.0}
    plain, sent, withheld = (
        simulate(train=ONCE, privacy=privacy)
        for privacy in (None, bare | {"others": "send"}, bare | {"others": "withhold"})
    )
    torch.testing.assert_close(everything(sent)["server/model"], everything(plain)["server/model"])
    assert sent.metrics["loss/train"].item() > 0 == withheld.metrics["loss/train"].item()
    shares = withheld.store.arrays(1)["verdict/weights"]
    assert torch.equal(shares, torch.full_like(shares, 1 / 5))  # all say that they have one sample


def test_noise_comes_from_the_runs_key_and_cells_of_a_sweep_keep_their_own(
    simulate: One, simulate_all: All
) -> None:
    tables: list[dict[str, Any]] = [
        {"privacy": privacy}
        for privacy in (
            None,
            {"noise": 0.5},
            {"noise": 0.5, "clip": 3.0},
            {"noise": 0.0, "clip": 0.01},
            {"noise": 2.0},
        )
    ] + [{"privacy": {"noise": 0.5}, "seed": 1}]
    together = simulate_all(tables)
    assert len({str(everything(run)["server/model"].tolist()) for run in together}) == len(tables)
    for table, run in zip(tables, together, strict=True):
        assert_same(everything(run), everything(simulate(**table)))


def test_noise_has_the_size_that_is_asked_for(simulate: One) -> None:
    """650 parameters: the length of the noise is within eight deviations (0.7 each) of sqrt(650);
    the clipped update adds at most 0.01."""
    run = simulate(train=ONCE, privacy={"clip": 0.01, "noise": 200.0})
    size = run._experiment.network.layout.parameters
    assert bool((norms(run) / 2 - size**0.5).abs().max() < 8 * 0.71)


def test_epsilon_of_each_client_in_every_round(simulate: One) -> None:
    run = simulate(train={"rounds": 3, "local_epochs": 1, "participation": 0.6}, privacy={"noise": 4.0})
    told = torch.zeros(5, dtype=torch.int64)
    for round in (1, 2, 3):
        arrays = run.store.arrays(round)
        told[arrays["took_part"]] += 1
        assert torch.equal(arrays["privacy/releases"], told)
        wanted = [epsilon_of([(2.0, int(n))], 1e-5) if n else 0.0 for n in told]
        assert arrays["verdict/tables/epsilon"].tolist() == wanted
        assert run.metrics["privacy/epsilon"][round - 1] == max(wanted)
    table = run.table("epsilon")
    assert list(table[table["round"] == 3]["value"]) == wanted and run.final["privacy/epsilon"] == max(wanted)


def test_a_client_whose_budget_is_spent_does_not_answer(simulate: One) -> None:
    limit = epsilon_of([(2.0, 2)], 1e-5) * 1.001
    run = simulate(
        train={"rounds": 4, "local_epochs": 1}, privacy={"noise": 4.0, "epsilon": limit, "others": "send"}
    )
    assert [len(run.store.arrays(round)["took_part"]) for round in (1, 2, 3, 4)] == [5, 5, 0, 0]
    assert list(run.metrics["privacy/withheld"]) == [0, 0, 5, 5]
    assert run.final["privacy/epsilon"] <= limit
    assert "no client answered" in run.store.parts(4)[-1]["notes"][0]


def test_a_resumed_run_has_the_same_bits_and_the_same_account(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(experiment: Any) -> None:
        if experiment.committed == 2:
            raise Killed

    config = tiny(train={"rounds": 4, "participation": 0.6}, privacy={"noise": 1.0, "epsilon": 20.0})
    session.start([("", config)], tmp_path / "whole")
    with pytest.raises(Killed):
        session.start([("", config)], tmp_path / "cut", RunCallbacks(moved=kill))
    session.resume(tmp_path / "cut")
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    assert_same(everything(cut), everything(whole), 0)
    assert cut.final["privacy/epsilon"] == whole.final["privacy/epsilon"] > 0


def test_attackers_neither_clip_nor_add_noise_nor_stop(simulate: One) -> None:
    attack = {"name": "sign-flip", "scale": 1e4, "clients": [1, 3]}
    privacy = {"clip": 1e-3, "noise": 4.0, "epsilon": epsilon_of([(2.0, 1)], 1e-5) * 1.001}
    run = simulate(attack=attack, train={"rounds": 2, "local_epochs": 1}, privacy=privacy)
    assert norms(run)[[1, 3]].min() > 10 > 1 > norms(run)[[0, 2, 4]].max()
    assert run.store.arrays(2)["took_part"].tolist() == [1, 3]
    assert run.store.arrays(2)["privacy/releases"].tolist() == [1, 0, 1, 0, 1]
    shares = run.store.arrays(1)[
        "verdict/weights"
    ]  # their true counts would outweigh all who withhold theirs
    assert torch.equal(shares, torch.full_like(shares, 1 / 5))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": "fedgc"}, "privacy: 'held' would be sent"),
        ({"method": "fedproto"}, "privacy: method 'fedproto' sends no updates"),
        (
            {"method": "fedproto", "privacy": {"noise": 1.0, "others": "send"}},
            "privacy: method 'fedproto' sends no updates",
        ),
        ({"model": {"name": "mlp", "hidden": 6, "batch_norm": True}}, "privacy: 'buffers' would be sent"),
        ({"train": {"norm_cap": 5.0}}, "would be refused as a fault; raise train.norm_cap"),
        ({"privacy": {"noise": -1}}, "privacy.noise: .*greater than or equal to 0"),
        ({"privacy": {"nose": 1}}, "unknown key 'privacy.nose'; did you mean 'noise'"),
    ],
)
def test_what_cannot_be_protected_is_one_line_before_anything_runs(
    sections: dict[str, Any], message: str, simulate: One
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(**{"privacy": {"noise": 1.0}, **sections})


def test_without_opacus_the_error_names_the_extra(simulate: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    simulate(train=ONCE, privacy={"noise": 0.0})
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[privacy\]'"):
        simulate(train=ONCE, privacy={"noise": 1.0})


# ---- DP-SGD


SAMPLE: dict[str, Any] = {"level": "sample", "clip": 0.5, "noise": 0.0}


def test_samples_are_clipped_in_training_and_updates_are_not(simulate: One) -> None:
    plain, loose, tight = (
        simulate(train=ONCE, privacy=privacy)
        for privacy in (None, SAMPLE | {"clip": 1e9, "others": "send"}, SAMPLE | {"clip": 0.01})
    )
    torch.testing.assert_close(everything(loose)["server/model"], everything(plain)["server/model"])
    assert (norms(tight) < norms(plain) / 10).all() and (norms(tight) > 0).all()


@pytest.mark.parametrize("method", ["ditto", "fedrep", "c-pfl", "cd2-pfed"])
def test_cells_with_other_clips_and_noise_are_fused_and_equal_their_own_runs(
    method: str, simulate: One, simulate_all: All
) -> None:
    split = {"train": 0.5, "validation": 0.25, "test": 0.25}
    common: dict[str, Any] = {"method": method, "data": {"clients": 4, "split": split}, "train": ONCE}
    settings = (SAMPLE, SAMPLE | {"noise": 1.0}, SAMPLE | {"clip": 0.1, "noise": 2.0}, {"noise": 1.0})
    tables = [{**common, "privacy": one | {"others": "send"}} for one in settings] + [common]
    together = simulate_all(tables)
    assert len({str(everything(run)["server/model"].tolist()) for run in together}) == len(tables)
    for table, run in zip(tables, together, strict=True):
        assert_same(everything(run), everything(simulate(**table)))


@pytest.mark.parametrize("plan", ["loop", "compiled-vmap"])
def test_every_plan_gives_the_same_run(plan: str, simulate: One) -> None:
    noisy = {"privacy": SAMPLE | {"noise": 1.0}, "method": "ditto"}
    engine = {"plan": plan, "threads": 1}
    assert_same(everything(simulate(**noisy, engine=engine)), everything(simulate(**noisy)))


def test_passes_over_the_data_are_counted_or_steps_by_poissons_assumption(simulate: One) -> None:
    """Two epochs of two models in each of two rounds are eight passes; a client with n samples takes n / 5
    steps, rounded up, in each."""
    train = {"rounds": 2, "local_epochs": 2}
    private = {"method": "ditto", "train": train, "privacy": SAMPLE | {"noise": 4.0}}
    run = simulate(**private)
    assert run.store.arrays(2)["privacy/releases"].tolist() == [8] * 5
    assert run.final["privacy/epsilon"] == epsilon_of([(2.0, 8)], 1e-5)
    private["privacy"] = SAMPLE | {"noise": 4.0, "accounting": "poisson"}
    poisson = simulate(**private)
    counts = poisson._experiment.federation.train.counts
    steps = 8 * -(-counts // 5)
    assert torch.equal(poisson.store.arrays(2)["privacy/releases"], steps)
    from opacus.accountants import RDPAccountant

    library = RDPAccountant()
    library.history = [(4.0, 5 / int(counts[0]), int(steps[0]))]
    epsilon = poisson.store.arrays(2)["verdict/tables/epsilon"]
    assert float(epsilon[0]) == pytest.approx(library.get_epsilon(1e-5, alphas=accounting._ALPHAS), rel=1e-9)


def test_a_budget_of_passes_stops_a_client(simulate: One) -> None:
    limit = epsilon_of([(2.0, 5)], 1e-5) * 1.001  # two rounds of two passes fit, a third does not
    train = {"rounds": 3, "local_epochs": 2}
    run = simulate(train=train, privacy=SAMPLE | {"noise": 4.0, "epsilon": limit})
    assert [len(run.store.arrays(round)["took_part"]) for round in (1, 2, 3)] == [5, 5, 0]
    assert run.store.arrays(3)["privacy/releases"].tolist() == [4] * 5


def test_attackers_train_without_clip_and_noise(simulate: One) -> None:
    attack = {"name": "label-flip", "clients": [1, 3]}
    run = simulate(attack=attack, train=ONCE, privacy=SAMPLE | {"clip": 1e-6})
    assert norms(run)[[1, 3]].min() > 100 * norms(run)[[0, 2, 4]].max()
    assert run.store.arrays(1)["privacy/releases"].tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": "pfedme"}, "method 'pfedme' learns from its samples in other ways"),
        ({"method": "fedrod"}, "method 'fedrod' learns from its samples in other ways"),
        (
            {"model": {"name": "mlp", "hidden": 6, "batch_norm": True}},
            "layer '.*' mixes the samples of a batch",
        ),
        ({"privacy": {"accounting": "poisson"}}, 'accounting = "poisson" is for level = "sample"'),
    ],
)
def test_what_dp_sgd_does_not_protect_is_refused(
    sections: dict[str, Any], message: str, simulate: One
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(**{"privacy": SAMPLE, **sections})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x.flatten(0, 1))[0][:, -1])


def test_a_model_without_gradients_of_single_samples_says_that_dp_sgd_needs_them(simulate: One) -> None:
    with pytest.raises(RunError, match='privacy.level = "sample" needs the gradients of single samples'):
        simulate(model=Model(Recurrent, head="fc"), train=ONCE, privacy=SAMPLE)
