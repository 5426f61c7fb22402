"""Manufactured data, toy stages and drivers of processes, shared by the tests and the benchmarks.

``tests`` is on the path of the tests (pyproject.toml) and of every process that they start (conftest.py), so that ranks
can import what is here.
"""
