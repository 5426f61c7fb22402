"""Functions for worker processes, which import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time


def half(number):
    return number / 2


def inverse(number):
    return 1 / number


def process_id(number):
    return os.getpid()


def family(number):
    return os.getpid(), os.getppid()


def slow(number):
    time.sleep(0.02)
    return number


def end(number):
    os._exit(3)


def killed_at_2(number):
    """As the kernel does where there is no memory left."""
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class Particular(Exception):
    """Cannot be made again from its arguments, as many exceptions of libraries."""

    def __init__(self, name, place):
        super().__init__(f"{name} at {place}")


def particular(number):
    raise Particular("damage", number)


def unpicklable(number):
    """What cannot be sent back."""
    return (lambda: number) if number == 1 else number


class Broken:
    """Can be sent, but not received."""

    def __reduce__(self):
        return int, ("no number",)


def broken(number):
    return Broken()


def threads_of_torch(number):
    return sys.modules["torch"].get_num_threads()


class NotHere:
    """A function whose module the worker cannot import."""

    def __reduce__(self):
        return __import__, ("sharmill_no_such_module",)

    def __call__(self, item):
        return item


def nested(number):
    from sharmill.training import parallel_map

    return list(parallel_map([number], half, 1)), list(parallel_map([number], half, 1, kind="process"))


def samples(cut):
    """The cut with its audio as an attribute."""
    cut.samples = cut.load_audio()
    return cut
