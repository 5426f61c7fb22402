"""WeNet-style chains, which turn lists, text files and any iterable into batches step by step, without cuts."""
