"""Experiment trackers that follow a run: TensorBoard, MLflow, Weights & Biases, or your own (base.py says
what it must implement).

Nothing is sent anywhere unless a tracker is asked for by name, and no run fails because of a tracker
(following.py).
"""

from holdfast.tracking.base import KnownRun, Tracker
from holdfast.tracking.following import chosen, tracked

__all__ = ["KnownRun", "Tracker", "chosen", "tracked"]
