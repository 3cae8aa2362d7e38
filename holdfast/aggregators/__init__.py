"""Rules that turn many updates into one, one file each. The registry finds the files."""

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, Wrapper

__all__ = ["AggregationContext", "Aggregator", "Reduced", "Wrapper"]
