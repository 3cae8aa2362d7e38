from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.evaluation import metrics
from holdfast.evaluation.metrics import NAMES, detection, of_round, of_run


def counts(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Five clients: accuracies .5, .8, 0, 1 and (malicious) 1; the fourth has 10 samples, the third client's test
# set is empty in `EMPTY`.
FIELDS = {
    "test/total": counts(4, 5, 2, 10, 3),
    "test/global/correct": counts(2, 4, 0, 10, 3),
    "test/global/loss": counts(4, 5, 4, 1, 100),
    "test/personal/correct": counts(4, 5, 0, 0, 0),
    "test/personal/loss": counts(0, 0, 0, 21, 0),
}
BENIGN = torch.tensor([True, True, True, True, False])


def test_one_round_by_hand() -> None:
    figures = of_round(FIELDS, BENIGN, ("global", "personal"), "global")
    mean = (0.5 + 0.8 + 0 + 1) / 4
    spread = (((0.5 - mean) ** 2 + (0.8 - mean) ** 2 + mean**2 + (1 - mean) ** 2) / 4) ** 0.5
    assert figures == pytest.approx(
        {
            "accuracy": mean,
            "accuracy/global": mean,
            "loss": 14 / 21,
            "loss/global": 14 / 21,
            "accuracy/pooled": 16 / 21,
            "accuracy/std": spread,
            "accuracy/worst10": 0.0,
            "accuracy/personal": 0.5,
            "loss/personal": 1.0,
            "accuracy/better_of": mean,
            "accuracy/tacc": mean,
            "accuracy/tacc/pooled": 16 / 21,
        }
    )


def test_the_deployed_model_gives_the_headline() -> None:
    figures = of_round(FIELDS, BENIGN, ("global", "personal"), "personal")
    assert figures["accuracy"] == figures["accuracy/personal"] == 0.5
    assert figures["accuracy/pooled"] == pytest.approx(9 / 21) and figures[
        "accuracy/better_of"
    ] == pytest.approx(0.575)


# The same clients and a method with customised models: means .3625 and .5, pooled 12/21 and 9/21: each way
# has another winner.
CUSTOMISED = FIELDS | {
    "test/customised/correct": counts(1, 1, 0, 10, 3),
    "test/customised/loss": counts(0, 0, 0, 0, 0),
}


def test_fedcaps_tacc_is_the_better_average_of_customised_and_personal_models() -> None:
    """Neither the global model (.575, 16/21) counts where there are customised ones, nor is the better model
    of each client taken ((1 + 1 + 0 + 1) / 4)."""
    customised = (0.25 + 0.2 + 0 + 1) / 4
    figures = of_round(CUSTOMISED, BENIGN, ("global", "customised", "personal"), "personal")
    assert figures["accuracy/customised"] == pytest.approx(customised) and customised < 0.5
    assert figures["accuracy/tacc"] == 0.5 and figures["accuracy/tacc/pooled"] == pytest.approx(12 / 21)
    assert figures["accuracy/better_of"] == pytest.approx(0.575)


def test_tacc_of_methods_that_lack_some_models() -> None:
    """What clients are sent is the global model where it is no customised one. Without one of the two, the
    other counts; where one was not measured, nothing can be said."""
    taken = {
        models: of_round(FIELDS, BENIGN, models, models[-1])
        for models in (("global",), ("personal",), ("global", "personal"))
    }
    found = {
        models: (figures["accuracy/tacc"], figures["accuracy/tacc/pooled"])
        for models, figures in taken.items()
    }
    assert found == {
        models: pytest.approx(both)
        for models, both in {
            ("global",): (0.575, 16 / 21),
            ("personal",): (0.5, 9 / 21),
            ("global", "personal"): (0.575, 16 / 21),
        }.items()
    }
    every = ("global", "customised", "personal")
    figures = of_round(CUSTOMISED, BENIGN, ("global", "personal"), "personal", has=every)
    assert (
        figures["accuracy/tacc"] is None
        and figures["accuracy/tacc/pooled"] is None
        and figures["accuracy/better_of"] is not None
    )
    assert (
        of_round(CUSTOMISED, BENIGN, ("customised", "personal"), "personal", has=every)["accuracy/tacc"]
        == 0.5
    )


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up(clients: int, tenth: int) -> None:
    correct = torch.arange(clients, dtype=torch.float64)
    fields = {
        "test/total": torch.full((clients,), 100.0),
        "test/global/correct": correct,
        "test/global/loss": correct,
    }
    figures = of_round(fields, torch.ones(clients, dtype=torch.bool), ("global",), "global")
    assert figures["accuracy/worst10"] == pytest.approx(sum(range(tenth)) / tenth / 100)


def test_clients_without_test_samples_do_not_count() -> None:
    fields = {**FIELDS, "test/total": counts(4, 5, 0, 10, 3)}
    assert of_round(fields, BENIGN, ("global",), "global")["accuracy"] == pytest.approx((0.5 + 0.8 + 1) / 3)


def test_without_clients_figures_are_null() -> None:
    nobody = {name: value[:0] for name, value in FIELDS.items()}
    figures = of_round(nobody, BENIGN[:0], ("global", "personal"), "personal")
    assert set(figures.values()) == {None} and {
        "accuracy/better_of",
        "accuracy/tacc",
        "accuracy/tacc/pooled",
    } <= set(figures)
    assert set(of_round(FIELDS, torch.zeros(5, dtype=torch.bool), ("global",), "global").values()) == {None}


def test_validation_figures_are_reported_beside_test_figures() -> None:
    fields = FIELDS | {f"validation/{name.removeprefix('test/')}": value for name, value in FIELDS.items()}
    fields["validation/global/correct"] = counts(4, 5, 2, 10, 0)
    figures = of_round(fields, BENIGN, ("global",), "global")
    assert figures["validation/accuracy"] == 1.0 and figures["accuracy"] == pytest.approx(0.575)
    assert figures["validation/accuracy/worst10"] == 1.0


ASKED = FIELDS | {
    "test/global/auc": counts(0.5, -1, 1, 0.75, 0.25),
    "test/personal/auc": counts(-1, -1, -1, -1, 1),
}


def test_a_metric_is_averaged_where_it_is_defined() -> None:
    """The second client has one class only, and the fifth is malicious."""
    figures = of_round(ASKED, BENIGN, ("global", "personal"), "global", ("auc",))
    plain = of_round(FIELDS, BENIGN, ("global", "personal"), "global")
    assert {name: value for name, value in figures.items() if name in plain} == plain
    assert {name: value for name, value in figures.items() if name not in plain} == pytest.approx(
        {
            "auc": 0.75,
            "auc/global": 0.75,
            "auc/std": (2 * 0.25**2 / 3) ** 0.5,
            "auc/worst10": 0.5,
            "auc/clients": 3,
            "auc/personal": None,
        }
    )
    undefined = of_round(ASKED, BENIGN, ("global", "personal"), "personal", ("auc",))
    assert undefined["auc"] is None and undefined["auc/std"] is None and undefined["auc/clients"] == 0


def test_a_metric_of_validation_data() -> None:
    fields = ASKED | {f"validation/{name.removeprefix('test/')}": value for name, value in ASKED.items()}
    fields["validation/global/auc"] = counts(1, -1, 1, 1, 0)
    figures = of_round(fields, BENIGN, ("global",), "global", ("auc",))
    assert figures["validation/auc"] == figures["validation/auc/global"] == 1.0 and figures["auc"] == 0.75


def part(round: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    metrics = {
        "accuracy": accuracy,
        "accuracy/global": accuracy,
        "bytes/up": 10,
        "bytes/down": 20,
        "refused": 1,
        "cohort": 3,
        "loss/train": 2.0,
    }
    return {
        "round": round,
        "metrics": metrics | more.pop("metrics", {}),
        "seconds": {"client": 0.5, "server": 0.25},
        **more,
    }


NOBODY = torch.zeros(0, dtype=torch.int64)


def run(
    parts: list[dict[str, Any]],
    targets: tuple[float, ...] = (0.8,),
    malicious: Tensor = NOBODY,
    banned: Any = (),
) -> dict[str, Any]:
    return of_run(parts, targets, malicious, 10, dict.fromkeys(banned, "why"))


def test_a_whole_run_by_hand() -> None:
    accuracy = [0.1, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.6]
    final = run([part(r + 1, a, fallback=r < 2) for r, a in enumerate(accuracy)], (0.5, 0.8, 0.95))
    last = torch.tensor(accuracy[-10:], dtype=torch.float64)
    assert final["accuracy"] == final["accuracy/global"] == 0.6 and final["accuracy/best"] == 0.9
    assert final["accuracy/last10"] == pytest.approx(0.77) and final["accuracy/last10_std"] == pytest.approx(
        float(last.std(unbiased=False))
    )
    assert (final["rounds_to/0.50"], final["rounds_to/0.80"], final["rounds_to/0.95"]) == (2, 2, None)
    assert (
        final["fallback_rounds"] == 2
        and final["bytes/up"] == 120
        and final["bytes/down"] == 240
        and final["refused"] == 12
    )
    assert (
        final["seconds/client"] == 6.0 and final["seconds/server"] == 3.0 and final["seconds/evaluate"] == 0.0
    )
    assert (
        final["attack/asr"] is None and final["detection/dacc"] is None and final["accuracy/selected"] is None
    )
    assert "cohort" not in final and "loss/train" not in final


def test_near_targets_have_names_of_their_own() -> None:
    final = run([part(1, 0.802), part(2, 0.9)], (0.8, 0.801, 0.804, 0.9, 1.0))
    assert {name: value for name, value in final.items() if name.startswith("rounds_to/")} == {
        "rounds_to/0.80": 1,
        "rounds_to/0.801": 1,
        "rounds_to/0.804": 2,
        "rounds_to/0.90": 2,
        "rounds_to/1.00": None,
    }


def test_every_name_is_always_there() -> None:
    final = run([])
    assert (
        all(final[name] is None for name in NAMES)
        and final["rounds_to/0.80"] is None
        and final["bytes/up"] == 0
    )


def test_a_metric_that_was_asked_for_is_in_every_result() -> None:
    parts = [
        part(1, 0.5, metrics={"auc": 0.7, "auc/global": 0.7}),
        part(2, 0.6, metrics={"auc": 0.8, "auc/global": 0.8}),
    ]
    final = of_run(parts, (), NOBODY, 10, {}, ("auc", "macro_f1"))
    assert (
        final["auc"] == final["auc/global"] == 0.8
        and final["auc/personal"] is None
        and final["macro_f1/worst10"] is None
    )
    assert of_run([], (), NOBODY, 10, {}, ("auc",))["auc/clients"] is None
    assert "auc" not in of_run([part(1, 0.5)], (), NOBODY, 10, {})


def test_rounds_that_were_not_evaluated_are_passed_over() -> None:
    parts = [part(1, 0.3), part(2, 0.5), part(3, None, metrics={"accuracy": None, "accuracy/global": None})]
    final = run(parts, (0.4,))
    assert final["accuracy"] == 0.5 and final["rounds_to/0.40"] == 2 and final["bytes/up"] == 30


def test_without_the_deployed_model_the_others_are_still_reported() -> None:
    final = run(
        [part(1, None, metrics={"accuracy/global": 0.4}), part(2, None, metrics={"accuracy/global": 0.6})]
    )
    assert final["accuracy"] is None and final["accuracy/global"] == 0.6 and final["rounds_to/0.80"] is None


def test_selected_by_validation_is_the_first_best() -> None:
    parts = [
        part(r, a, metrics={"validation/accuracy": v})
        for r, a, v in ((1, 0.3, 0.5), (2, 0.6, 0.9), (3, 0.9, 0.9), (4, 1.0, 0.1))
    ]
    assert run(parts)["accuracy/selected"] == 0.6


@pytest.mark.parametrize(
    ("malicious", "banned", "dacc", "fpr", "fnr"),
    [
        ([1, 2, 3], [], 0.7, 0.0, 1.0),
        ([1, 2, 3], [1, 2, 3], 1.0, 0.0, 0.0),
        ([1, 2, 3], [1, 4, 5], 0.6, 2 / 7, 2 / 3),
        (list(range(10)), [1], 0.1, None, 0.9),
    ],
)
def test_detection_rates(
    malicious: list[int], banned: list[int], dacc: float, fpr: float | None, fnr: float
) -> None:
    got = detection(torch.tensor(malicious), 10, dict.fromkeys(banned, "why"))
    assert got["detection/dacc"] == pytest.approx(dacc) and got["detection/fnr"] == pytest.approx(fnr)
    assert got["detection/fpr"] == (None if fpr is None else pytest.approx(fpr))


@pytest.mark.parametrize(
    "figures, exchanges, words",
    [
        ({"loss": 1.0}, [([0, 1], {})], None),
        ({"loss": None}, [], None),
        (
            {"loss": 1.0},
            [([], {0: "update is not finite", 1: "loss is not finite"})],
            "nothing that the 2 clients sent was finite",
        ),
        ({"loss": 1.0}, [([1], {0: "update is not finite"})], None),
        ({"loss": 1.0}, [([0, 1], {}), ([], {0: "update is not finite"})], "nothing that the 1 clients sent"),
        (
            {"loss": 1.0},
            [([9], {0: "update is not finite"})],
            "nothing that the 1 clients sent",
        ),  # what an attacker sends is no sign of life
        ({"loss": 1.0}, [([], {9: "update is not finite"})], None),  # nor of death
        ({"loss": 1.0}, [([], {0: "update is not finite", 1: "update has a norm above 3"})], None),
        ({"loss": 1.0, "loss/personal": float("nan")}, [([0], {})], "loss/personal is not finite"),
        ({"validation/loss": float("inf")}, [], "validation/loss is not finite"),
        ({"accuracy": float("nan")}, [], None),
    ],
)
def test_when_a_round_counts_as_diverged(figures: Any, exchanges: Any, words: str | None) -> None:
    said = metrics.divergence(figures, exchanges, malicious={9})
    assert said is None if words is None else said is not None and words in said


def test_the_first_diverged_round() -> None:
    assert metrics.first_diverged([{"round": 1}, {"round": 2, "diverged": None}]) is None
    assert (
        metrics.first_diverged(
            [{"round": 1}, {"round": 2, "diverged": "why"}, {"round": 3, "diverged": "why"}]
        )
        == 2
    )


def test_attack_success_of_a_round_and_of_a_run() -> None:
    """Images of benign clients together: 3 of 4 and 1 of 6; the malicious third client does not count."""
    fields = {
        "test/total": torch.tensor([1.0, 1.0, 1.0]),
        "test/global/correct": torch.ones(3),
        "test/global/loss": torch.zeros(3),
        "triggered/total": torch.tensor([4.0, 6.0, 9.0]),
        "triggered/global/correct": torch.tensor([3.0, 1.0, 9.0]),
    }
    benign = torch.tensor([True, True, False])
    found = of_round(fields, benign, ["global"], "global")
    assert (
        found["attack/asr"] == found["attack/asr/global"] == found["attack/asr/strict"] == pytest.approx(0.4)
    )
    assert found["attack/asr/mean"] == pytest.approx((3 / 4 + 1 / 6) / 2)
    nothing = of_round(fields | {"triggered/total": torch.zeros(3)}, benign, ["global"], "global")
    assert nothing["attack/asr"] is None and nothing["attack/asr/mean"] is None
    final = run(
        [
            part(r, 0.5, metrics={"attack/asr": r / 20}, attack=["clamped"] if r < 3 else [])
            for r in range(1, 13)
        ]
    )
    assert final["attack/asr"] == 0.6 and final["attack/asr/last10"] == pytest.approx(sum(range(3, 13)) / 200)
    assert final["attack/noted_rounds"] == 2 and run([part(1, 0.5)])["attack/asr/last10"] is None


def test_attack_success_of_each_model_and_without_the_target_class() -> None:
    """Of 4 and 6 triggered samples 1 and 2 show the target anyway; 1 of these is called it by the personal
    models."""
    fields = {
        f"test/{name}": torch.ones(3)
        for name in ("total", "global/correct", "global/loss", "personal/correct")
    }
    fields |= {
        "test/personal/loss": torch.zeros(3),
        "triggered/total": torch.tensor([4.0, 6.0, 9.0]),
        "triggered/global/correct": torch.tensor([3.0, 2.0, 9.0]),
        "triggered/personal/correct": torch.tensor([1.0, 1.0, 9.0]),
        "triggered/of_target/total": torch.tensor([1.0, 2.0, 9.0]),
        "triggered/of_target/global/correct": torch.tensor([1.0, 2.0, 9.0]),
        "triggered/of_target/personal/correct": torch.tensor([0.0, 1.0, 9.0]),
    }
    found = of_round(fields, torch.tensor([True, True, False]), ["global", "personal"], "personal")
    assert found["attack/asr"] == found["attack/asr/personal"] == pytest.approx(0.2)
    assert found["attack/asr/global"] == pytest.approx(0.5)
    assert found["attack/asr/strict"] == found["attack/asr/strict/personal"] == pytest.approx(1 / 7)
    assert found["attack/asr/strict/global"] == pytest.approx(2 / 7)


# ---- matching

PARTNERS = {"partner": torch.tensor([1, 0, 3, 2]), "target": torch.tensor([1, 0, 2, 2])}


def test_matches_against_the_true_partners() -> None:
    """Clients 0, 2 and 3 ask; 0 is right about its target and wrong about class 2, which is not judged;
    nobody is found for 2."""
    matches, ids = torch.tensor([[-1, 1, 3], [-1, -1, -2], [-1, -1, 2]]), torch.tensor([0, 2, 3])
    everybody = torch.ones(3, dtype=torch.bool)
    expected = {"matching/accuracy": 2 / 3, "matching/right": 2, "matching/decisions": 3}
    assert metrics.of_matches(matches, ids, PARTNERS, everybody) == expected
    benign = torch.tensor([True, True, False])
    assert metrics.of_matches(matches, ids, PARTNERS, benign) == {
        "matching/accuracy": 0.5,
        "matching/right": 1,
        "matching/decisions": 2,
    }
    untold = metrics.of_matches(matches, ids, {"partner": PARTNERS["partner"]}, everybody)
    assert untold["matching/decisions"] == 4 and untold["matching/accuracy"] == 0.5
    assert metrics.of_matches(matches, ids, {}, everybody) == {"matching/accuracy": None}
    assert metrics.of_matches(torch.full((3, 3), -1), ids, PARTNERS, everybody)["matching/accuracy"] is None


def test_matching_accuracy_of_a_run_is_over_all_its_decisions() -> None:
    one = {"matching/accuracy": 1.0, "matching/right": 1, "matching/decisions": 1}
    three = {"matching/accuracy": 0.0, "matching/right": 0, "matching/decisions": 3}
    final = run(
        [
            part(1, 0.5, metrics=one),
            part(2, None, metrics={"matching/accuracy": None}),
            part(3, 0.5, metrics=three),
        ]
    )
    assert final["matching/accuracy"] == 0.25 and "matching/right" not in final
    assert run([part(1, 0.5)])["matching/accuracy"] is None
