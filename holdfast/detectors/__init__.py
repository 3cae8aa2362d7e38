"""Tests that find malicious clients, for any method, one file each. The registry finds the files."""

from holdfast.detectors.base import Detector, Judgement

__all__ = ["Detector", "Judgement"]
