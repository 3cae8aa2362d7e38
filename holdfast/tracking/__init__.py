"""Experiment trackers that watch a run: TensorBoard, MLflow, Weights & Biases, or one of yours (base.py says
what it has to do).

Nothing is sent anywhere unless a tracker is asked for by name, and no run fails because of one
(following.py)."""

from holdfast.tracking.base import KnownRun, Tracker
from holdfast.tracking.following import chosen, tracked

__all__ = ["KnownRun", "Tracker", "chosen", "tracked"]
