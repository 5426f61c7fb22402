"""WeNet's chain: lists, text and any iterable, step by step into batches; for data that are no cuts."""
