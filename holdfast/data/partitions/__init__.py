"""Ways to assign samples to clients, one per file, found by the registry; base.py says how to add one."""

from holdfast.data.partitions.base import Assignment, Partition

__all__ = ["Assignment", "Partition"]
