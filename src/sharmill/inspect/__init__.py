"""Viewing and listening to one cut, one shard or a whole dataset: ``sharmill inspect`` and ``sharmill decode``."""
