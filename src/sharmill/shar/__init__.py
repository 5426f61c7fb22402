"""Shar datasets: the layout on disk, writing and reading."""

from sharmill.shar.reader import open_shar

__all__ = ["open_shar"]
