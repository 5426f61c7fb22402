"""Benchmarks on a GPU: ``__main__`` has the command, ``rows`` the rows over the ``models``."""
