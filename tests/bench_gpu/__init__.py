"""Benchmarks for an hour on a GPU: one archive, one command, no network, and a deadline that is kept.

``archive`` makes the archive, ``launch`` is what runs in it, and ``program`` has the rows over the ``models``.
"""
