"""Who is malicious: tests that can be attached to any method. One file each."""

from holdfast.detectors import committee, norm, normality
from holdfast.detectors.base import Detector, Judgement

__all__ = ["Detector", "Judgement", "committee", "norm", "normality"]
