"""One cut, one shard or a whole dataset, to look at and to listen to: ``sharmill inspect`` and ``sharmill decode``."""
