"""Rules that turn many updates into one. One file each."""

from holdfast.aggregators import (
    bulyan,
    centered_clip,
    clustered,
    dnc,
    fedcpa,
    fltrust,
    foolsgold,
    krum,
    mean,
    median,
    multi_krum,
    norm_bound,
    residual,
    rfa,
    trimmed_mean,
)
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, Wrapper

__all__ = [
    "AggregationContext",
    "Aggregator",
    "Reduced",
    "Wrapper",
    "bulyan",
    "centered_clip",
    "clustered",
    "dnc",
    "fedcpa",
    "fltrust",
    "foolsgold",
    "krum",
    "mean",
    "median",
    "multi_krum",
    "norm_bound",
    "residual",
    "rfa",
    "trimmed_mean",
]
