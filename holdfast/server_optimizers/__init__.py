"""Optimisers of the server, which turn the aggregate into the step of the model, one file each. The registry
finds the files."""

from holdfast.server_optimizers.base import ServerOptimizer, Step

__all__ = ["ServerOptimizer", "Step"]
