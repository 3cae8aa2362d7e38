"""Rules that turn many updates into one. One file each."""

from holdfast.aggregators import mean
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, Wrapper

__all__ = ["AggregationContext", "Aggregator", "Reduced", "Wrapper", "mean"]
