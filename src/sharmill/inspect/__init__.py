"""Viewing of a cut, a shard or a whole dataset, and decoding of codes: ``sharmill inspect`` and ``sharmill decode``."""
