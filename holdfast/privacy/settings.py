"""The [privacy] section: of an experiment, and of a node's own node.toml."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from holdfast.core.registry import setting


class PrivacySettings(BaseModel):
    """[privacy] of an experiment or of a node.toml.

    PrivacySettings(clip=1.0, noise=2.0, epsilon=8.0)
    PrivacySettings(level="sample", clip=1.0, noise=1.1)"""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    level: Literal["client", "sample"] = setting(
        "client",
        "what is protected: all data of a client, by clipping and noising its update; or each of its samples,"
        " by clipping and noising gradients in training (DP-SGD)",
    )
    clip: float = setting(
        1.0, "length to which a longer update is clipped; level sample: a longer gradient of a sample", gt=0
    )
    noise: float = setting(
        1.0,
        "standard deviation of the noise on every number of an update, or of the sum of a batch's gradients,"
        " in units of clip; 0: no noise and no guarantee",
        ge=0,
    )
    delta: float = setting(
        1e-5, "probability that the guarantee does not hold; well below 1 / clients", gt=0, lt=1
    )
    epsilon: float | None = setting(
        None, "an update that would bring its client above this is not sent; none: no limit", gt=0
    )
    others: Literal["withhold", "send"] = setting(
        "withhold",
        "fields that noise on updates does not protect: withheld or refused; or sent unchanged, and the"
        " guarantee is for updates only",
    )
    accounting: Literal["passes", "poisson"] = setting(
        "passes",
        "level sample: count each pass over the data, which is right for shuffled batches; or each step, as"
        " if batches were Poisson samples, as is usual with Opacus (simulations only)",
    )
    count: int = setting(1, "withhold: the number of samples that is sent instead of the true one", ge=1)

    @model_validator(mode="after")
    def _accounting_of_samples(self) -> Self:
        if self.accounting == "poisson" and self.level == "client":
            raise ValueError('accounting = "poisson" is for level = "sample"; leave it out')
        return self

    @property
    def of_samples(self) -> bool:
        return self.level == "sample"
