"""What malicious clients do. An attack registers here under kind `attack`."""

from holdfast.attacks import (
    adaptive,
    backdoor,
    gaussian,
    input_noise,
    ipm,
    label_flip,
    lie,
    mimic,
    min_max,
    min_sum,
    replacement,
    sign_flip,
)
from holdfast.attacks.adversary import Adversary
from holdfast.attacks.base import Attack, Trigger, View

__all__ = [
    "Adversary",
    "Attack",
    "Trigger",
    "View",
    "adaptive",
    "backdoor",
    "gaussian",
    "input_noise",
    "ipm",
    "label_flip",
    "lie",
    "mimic",
    "min_max",
    "min_sum",
    "replacement",
    "sign_flip",
]
