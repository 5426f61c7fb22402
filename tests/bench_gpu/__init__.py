"""Benchmarks on a GPU: ``__main__`` has the command, ``rows`` and ``tuning`` have the rows."""
