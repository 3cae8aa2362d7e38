"""How samples are dealt to clients, one idea per file. base.py says how to add one."""

from holdfast.data.partitions import (
    by_user,
    complementary_pairs,
    dirichlet,
    flower,
    grouped,
    iid,
    pathological,
    quantity,
    similarity,
    single_label,
)
from holdfast.data.partitions.base import Assignment, Partition

__all__ = [
    "Assignment",
    "Partition",
    "by_user",
    "complementary_pairs",
    "dirichlet",
    "flower",
    "grouped",
    "iid",
    "pathological",
    "quantity",
    "similarity",
    "single_label",
]
