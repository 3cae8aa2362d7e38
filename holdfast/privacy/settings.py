"""The [privacy] section: of an experiment, and of a node's own node.toml."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from holdfast.core.registry import setting


class PrivacySettings(BaseModel):
    """[privacy] of an experiment or of a node.toml.

    PrivacySettings(clip=1.0, noise=2.0, epsilon=8.0)"""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    clip: float = setting(1.0, "length to which a longer update is clipped", gt=0)
    noise: float = setting(
        1.0,
        "standard deviation of the noise on every number, in units of clip; 0: no noise and no guarantee",
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
    count: int = setting(1, "withhold: the number of samples that is sent instead of the true one", ge=1)
