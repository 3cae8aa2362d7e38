"""From counts per client to the figures of a result. Accuracies are in [0, 1], over benign clients, and the
name says of which model and data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.core.screening import NOT_FINITE

Figures = dict[str, float | None]
Answers = tuple[list[int], dict[int, str]]
"""One exchange: the clients whose replies were accepted, and why others were refused."""
SECONDS = ("client", "server", "server/aggregate", "server/calibrate", "server/detect", "evaluate")
_OF_MODELS = (
    "global",
    "customised",
    "personal",
    "pooled",
    "better_of",
    "tacc",
    "tacc/pooled",
    "worst10",
    "std",
    "best",
    "last10",
    "last10_std",
    "selected",
)
NAMES = ("accuracy", *(f"accuracy/{name}" for name in (*_OF_MODELS, "late")))
"""What every result has; null where a method has no such model or nothing was measured."""
_OF_METRICS = ("global", "customised", "personal", "worst10", "std", "clients")
"""The same for a metric that was asked for."""


def of_round(
    fields: Mapping[str, Tensor],
    benign: Tensor,
    models: Sequence[str],
    deployed: str,
    asked: Sequence[str] = (),
    has: Sequence[str] | None = None,
) -> Figures:
    """One evaluation: per model the mean over benign clients, pooled, spread and the worst tenth; the
    deployed model gives the headline. `asked` are the metrics beside accuracy and loss, `has` the method's
    models where not all of them were measured."""
    out: Figures = {}
    for split, prefix in (("test", ""), ("validation", "validation/")):
        if f"{split}/total" not in fields:
            continue
        pooled: Figures = {}
        for model in models:
            figures = _of_model(fields, split, model, benign)
            pooled[model] = figures["pooled"]
            out |= {
                f"{prefix}accuracy/{model}": figures.pop("mean"),
                f"{prefix}loss/{model}": figures.pop("loss"),
            }
            if model == deployed:
                out[f"{prefix}accuracy"] = out[f"{prefix}accuracy/{model}"]
                out[f"{prefix}loss"] = out[f"{prefix}loss/{model}"]
                out |= {f"{prefix}accuracy/{name}": value for name, value in figures.items()}
        means = {model: out[f"{prefix}accuracy/{model}"] for model in models}
        out[f"{prefix}accuracy/better_of"] = _largest(means, models)
        scored = of_tacc(models if has is None else has)
        out |= {
            f"{prefix}accuracy/tacc": _largest(means, scored),
            f"{prefix}accuracy/tacc/pooled": _largest(pooled, scored),
        }
        for metric in asked:
            for model in models:
                figures = _of_metric(fields[f"{split}/{model}/{metric}"][benign])
                out[f"{prefix}{metric}/{model}"] = mean = figures.pop("mean")
                if model == deployed:
                    out |= {
                        f"{prefix}{metric}": mean,
                        **{f"{prefix}{metric}/{name}": value for name, value in figures.items()},
                    }
    return {**out, **_of_triggered(fields, models, deployed, benign)}


def _of_triggered(
    fields: Mapping[str, Tensor], models: Sequence[str], deployed: str, benign: Tensor
) -> Figures:
    """The attack's success (ASR) on each model of benign clients: which share of their triggered test samples
    the models call the target, all samples together; strict: without samples of the target class, also where
    the attack counts these. Of the deployed model also the mean over clients."""
    out: Figures = {}
    for model in models:
        if f"triggered/{model}/correct" not in fields:
            continue
        fooled, shown = fields[f"triggered/{model}/correct"][benign], fields["triggered/total"][benign]
        out[f"attack/asr/{model}"] = strict = _share(fooled, shown)
        if "triggered/of_target/total" in fields:
            known = fields[f"triggered/of_target/{model}/correct"], fields["triggered/of_target/total"]
            strict = _share(fooled - known[0][benign], shown - known[1][benign])
            out[f"attack/asr/strict/{model}"] = strict
        if model == deployed:
            each = fooled[shown > 0] / shown[shown > 0]
            out["attack/asr"], out["attack/asr/strict"] = out[f"attack/asr/{model}"], strict
            out["attack/asr/mean"] = float(each.mean()) if len(each) else None
    return out


def _share(part: Tensor, whole: Tensor) -> float | None:
    total = float(whole.sum())
    return float(part.sum()) / total if total else None


def of_tacc(has: Sequence[str]) -> list[str]:
    """Which of a method's models FedCAP's TAcc takes the better of: what a client is sent, its customised
    model or else the global one, and what it made of it. The higher average counts, in the paper and in the
    released code, not each client's better model; the paper averages over clients, the code over test
    samples."""
    return [model for model in has if model != "global" or "customised" not in has]


def _largest(figures: Figures, models: Sequence[str]) -> float | None:
    """Of these models; null where one of them was not measured."""
    known = [figures.get(model) for model in models]
    return None if None in known else max((a for a in known if a is not None), default=None)


def of_late(fields: Mapping[str, Tensor], late: Tensor, models: Sequence[str], deployed: str) -> Figures:
    """Accuracy of clients that never trained, with the models they would receive now; empty where there are
    no such clients."""
    if not bool(late.any()):
        return {}
    found = {f"accuracy/late/{model}": _of_model(fields, "test", model, late)["mean"] for model in models}
    return {**found, **({"accuracy/late": found[f"accuracy/late/{deployed}"]} if deployed in models else {})}


def _of_model(fields: Mapping[str, Tensor], split: str, model: str, benign: Tensor) -> Figures:
    total = fields[f"{split}/total"]
    counted = benign & (total > 0)
    total, correct = total[counted], fields[f"{split}/{model}/correct"][counted]
    if not len(total):
        return {"mean": None, "loss": None, "pooled": None, "std": None, "worst10": None}
    accuracy = correct / total
    return _over_clients(accuracy) | {
        "loss": float(fields[f"{split}/{model}/loss"][counted].sum() / total.sum()),
        "pooled": float(correct.sum() / total.sum()),
    }


def _of_metric(values: Tensor) -> Figures:
    """The mean over the clients for which a metric is defined, and how many those are."""
    values = values[values >= 0]
    return (_over_clients(values) if len(values) else {"mean": None, "std": None, "worst10": None}) | {
        "clients": len(values)
    }


def _over_clients(values: Tensor) -> Figures:
    worst = values.sort().values[: max(1, math.ceil(len(values) / 10))]
    return {
        "mean": float(values.mean()),
        "std": float(values.std(unbiased=False)),
        "worst10": float(worst.mean()),
    }


def of_matches(matches: Tensor, ids: Tensor, facts: Mapping[str, Tensor], benign: Tensor) -> Figures:
    """How many decisions of a matching server name the true partner (FedCOM Table 2). `matches` [n, classes]
    has a peer's id, -1 where the client did not ask, less where no peer was found, which is wrong too. A
    partner is one in the client's target class: what is decided on other classes is not judged. Nothing can
    be said where the partition knows no partners."""
    if "partner" not in facts:
        return {"matching/accuracy": None}
    judged = (matches != -1) & benign[:, None]
    if "target" in facts:
        judged &= torch.arange(matches.shape[1]) == facts["target"][ids][:, None]
    right, decisions = int((judged & (matches == facts["partner"][ids][:, None])).sum()), int(judged.sum())
    return {
        "matching/accuracy": right / decisions if decisions else None,
        "matching/right": right,
        "matching/decisions": decisions,
    }


def divergence(figures: Figures, exchanges: Sequence[Answers], malicious: set[int]) -> str | None:
    """Why a round counts as diverged, if it does. Screening refuses what is not finite, so a run whose
    training explodes goes on with its old model and looks alive: the sign is a round in which all that benign
    clients sent was refused for that. A loss that is not finite, over the benign clients, is the other
    sign."""
    for accepted, refused in exchanges:
        reasons = [reason for client, reason in refused.items() if client not in malicious]
        if (
            reasons
            and not set(accepted) - malicious
            and all(reason.endswith(NOT_FINITE) for reason in reasons)
        ):
            return f"nothing that the {len(reasons)} clients sent was finite ({reasons[0]})"
    # a loss that was not measured is None
    worst = next(
        (
            name
            for name, value in figures.items()
            if "loss" in name and value is not None and not math.isfinite(value)
        ),
        None,
    )
    return f"{worst} is not finite" if worst is not None else None


def of_run(
    parts: Sequence[Mapping[str, Any]],
    targets: Sequence[float],
    malicious: Tensor,
    clients: int,
    banned: Mapping[int, Any],
    asked: Sequence[str] = (),
) -> Figures:
    """The final figures: the last evaluation, and figures over all rounds."""
    evaluated = [p for p in parts if p["metrics"].get("accuracy") is not None]
    # also where the deployed model is not among evaluate.models, and there is no headline
    measured = [
        p
        for p in parts
        if any(name.startswith("accuracy/") and v is not None for name, v in p["metrics"].items())
    ]
    names = [
        *NAMES,
        *(name for metric in asked for name in (metric, *(f"{metric}/{of}" for of in _OF_METRICS))),
    ]
    out: Figures = dict.fromkeys(names) | (measured[-1]["metrics"] if measured else {})
    of_rounds = (
        "bytes/",
        "cohort",
        "refused",
        "rejected",
        "loss/train",
        "matching/",
    )  # which are summed up below, or mean nothing later
    out = {name: value for name, value in out.items() if not name.startswith(of_rounds)}
    accuracy = [float(p["metrics"]["accuracy"]) for p in evaluated]
    if accuracy:
        last = torch.tensor(accuracy[-10:], dtype=torch.float64)
        out["accuracy/best"] = max(accuracy)
        out["accuracy/last10"] = float(last.mean())
        out["accuracy/last10_std"] = float(last.std(unbiased=False))
        out["accuracy/selected"] = _selected(evaluated)
    for target in targets:
        reached = [p["round"] for p in evaluated if float(p["metrics"]["accuracy"]) >= target]
        out[f"rounds_to/{target:.2f}" if round(target, 2) == target else f"rounds_to/{target}"] = (
            reached[0] if reached else None
        )
    out["diverged"] = first_diverged(parts)
    out["fallback_rounds"] = sum(bool(p.get("fallback")) for p in parts)
    fooled = [float(p["metrics"]["attack/asr"]) for p in parts if p["metrics"].get("attack/asr") is not None]
    out.setdefault("attack/asr", None)  # no attack with a trigger
    out["attack/asr/last10"] = math.fsum(fooled[-10:]) / len(fooled[-10:]) if fooled else None
    out["attack/noted_rounds"] = sum(bool(p.get("attack")) for p in parts)
    out |= _matching(parts)
    out |= detection(malicious, clients, banned)
    for name in ("bytes/up", "bytes/down", "refused", "rejected"):
        out[name] = sum(p["metrics"].get(name) or 0 for p in parts)
    for name in dict.fromkeys(
        (*SECONDS, *(name for p in parts for name in p.get("seconds", {})))
    ):  # a method may time more parts
        out[f"seconds/{name}"] = math.fsum(p.get("seconds", {}).get(name, 0.0) for p in parts)
    return out


def _matching(parts: Sequence[Mapping[str, Any]]) -> Figures:
    """Over all decisions of the run; none for methods that match no clients."""
    right, decisions = (
        sum(p["metrics"].get(f"matching/{name}", 0) for p in parts) for name in ("right", "decisions")
    )
    return {"matching/accuracy": right / decisions if decisions else None}


def first_diverged(parts: Sequence[Mapping[str, Any]]) -> int | None:
    return next((p["round"] for p in parts if p.get("diverged")), None)


def detection(malicious: Tensor, clients: int, banned: Mapping[int, Any]) -> Figures:
    """Bans compared with the real attackers, over all clients; undefined without attackers (FedCAP Table
    III)."""
    bad, out = set(malicious.tolist()), set(banned)
    if not bad:
        return {"detection/dacc": None, "detection/fpr": None, "detection/fnr": None}
    good = clients - len(bad)
    caught, wronged = len(bad & out), len(out - bad)
    return {
        "detection/dacc": (caught + good - wronged) / clients,
        "detection/fpr": wronged / good if good else None,
        "detection/fnr": (len(bad) - caught) / len(bad),
    }


def _selected(evaluated: Sequence[Mapping[str, Any]]) -> float | None:
    """Test accuracy of the round that validation data would choose: the first with the best validation
    accuracy."""
    scored = [p["metrics"] for p in evaluated if p["metrics"].get("validation/accuracy") is not None]
    return float(max(scored, key=lambda m: m["validation/accuracy"])["accuracy"]) if scored else None
