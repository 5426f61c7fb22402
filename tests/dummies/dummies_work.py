"""Functions for worker processes, which import them by name."""

from __future__ import annotations

import os


def half(number):
    return number / 2


def inverse(number):
    return 1 / number


def process_id(number):
    return os.getpid()


def end(number):
    os._exit(3)


def samples(cut):
    """The cut with its audio as an attribute."""
    cut.samples = cut.load_audio()
    return cut
