"""Shar datasets: the layout on disk, writing and reading."""

from sharmill.shar.reading.reader import open_shar
from sharmill.shar.reading.state import merge_states

__all__ = ["merge_states", "open_shar"]
