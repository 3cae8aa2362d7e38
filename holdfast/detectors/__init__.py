"""Who is malicious: tests that can be attached to any method."""

from holdfast.detectors.base import Detector, Judgement

__all__ = ["Detector", "Judgement"]
