"""Where samples come from. A source is chosen by data.name, set by data.options, and returns Samples.

To add one: subclass Source, register it under a name, return Samples from load. One that reads Parquet files
subclasses FolderSource, which finds them; what it decodes goes through `cached`, so that it is done once.
The registry finds the files."""

from holdfast.data.sources.base import FolderSource, Source

__all__ = ["FolderSource", "Source"]
