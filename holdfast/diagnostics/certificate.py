"""How far a backdoor may go before a smoothed prediction changes: the formulas of CRFL's certificate (Xie,
Chen, Chen, Li: CRFL: Certifiably Robust Federated Learning against Backdoor Attacks, ICML 2021, Theorem 3).

The smoothed classifier answers with the class that most of the models w_T + N(0, sigma_T^2 I) choose. Votes
of M drawn models bound the probability p_A of that class from below and p_B of the next one from above. Had R
clients, in one round t, trained on samples that are up to a length r away from the true ones, the answer
would have been the same if

    r^2 < -log(1 - (sqrt(p_A) - sqrt(p_B))^2) sigma_t^2
          / (2 R L^2 sum_i (p_i gamma tau_i eta q_i)^2  prod_{s > t} (2 Phi(rho_s / sigma_s) - 1))

with p_i the weight of attacker i in the mean, gamma the factor by which it scales its update, tau_i its local
steps, eta the learning rate, q_i the share of a batch that is poisoned, L a Lipschitz constant of the
gradient in the sample, rho_s and sigma_s the bound on the model's length and the noise of round s (of the
last one: those of the smoothed prediction)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Bounds = Literal["clopper-pearson", "hoeffding"]


def vote_bounds(votes: Tensor, alpha: float, bounds: Bounds = "clopper-pearson") -> tuple[Tensor, Tensor]:
    """[n] each: a lower bound of the probability of the class with most votes, an upper bound of that of the
    next, from votes [n, classes].

    clopper-pearson: exact intervals that hold for all classes of a sample at once with probability 1 - alpha,
    so that naming the winner after the votes were counted costs nothing. hoeffding: those of the paper, each
    of which holds with probability 1 - alpha for a class that is named beforehand."""
    draws, classes = votes.sum(1).double(), votes.shape[1]
    first, second = votes.double().sort(dim=1, descending=True).values[:, :2].unbind(1)
    if bounds == "hoeffding":
        width = (math.log(1 / alpha) / 2 / draws).sqrt()
        return (first / draws - width).clamp(min=0), (second / draws + width).clamp(max=1)
    from scipy.special import betaincinv  # ten megabytes, which only a certificate needs

    tail = alpha / (2 * classes)
    lower = torch.as_tensor(betaincinv(first.clamp(min=1).numpy(), (draws - first + 1).numpy(), tail))
    lower = torch.where(first > 0, lower, 0)
    upper = torch.as_tensor(betaincinv((second + 1).numpy(), (draws - second).clamp(min=1).numpy(), 1 - tail))
    return lower, torch.minimum(torch.where(second < draws, upper, 1), 1 - lower)


@dataclass(frozen=True)
class Threat:
    """What attackers of one round may do, and how much of it their models keep."""

    weights: Sequence[float]
    """p_i: what each attacker weighs in the mean."""
    steps: Sequence[float]
    """tau_i: how many local steps each takes."""
    lr: float
    lipschitz: float
    scale: float = 1.0
    poisoned: float = 1.0
    noise: float = 0.01
    """sigma of the attacked round."""
    later: Sequence[tuple[float, float]] = ()
    """rho and sigma of the rounds after it."""

    def kept(self) -> float:
        """The part of the difference that the later rounds leave: the product of 2 Phi(rho / sigma) - 1."""
        return math.prod(
            math.erf(rho / sigma / math.sqrt(2)) if sigma > 0 else 1.0 for rho, sigma in self.later
        )

    def reach(self) -> float:
        """The denominator of the squared radius."""
        squares = sum(
            (p * self.scale * steps * self.lr * self.poisoned) ** 2
            for p, steps in zip(self.weights, self.steps, strict=True)
        )
        return 2 * len(self.weights) * self.lipschitz**2 * squares * self.kept()


def radius(lower: Tensor, upper: Tensor, threat: Threat) -> Tensor:
    """[n]: how far poisoned samples may be from the true ones; NaN where the votes leave open which class
    wins."""
    gap = lower.sqrt() - upper.sqrt()
    far = -torch.log1p(-gap.square()) * threat.noise**2 / threat.reach()
    return torch.where(lower > upper, far.sqrt(), torch.nan)


def logistic_lipschitz(length: float, rho: float) -> float:
    """A Lipschitz constant in the sample (x, y) of the gradient (softmax(Wx) - y) x' of logistic regression
    with |W| <= rho on samples of a length up to `length`.

    A step dx changes softmax(Wx) by at most rho |dx| / 2, and |softmax(Wx) - y| <= sqrt 2; a step dy counts
    |x| |dy|. For length 1 the paper has sqrt(1 + (1 + rho)^2), which is larger from rho = 0.83 on."""
    return math.hypot(rho * length / 2 + math.sqrt(2), length)
