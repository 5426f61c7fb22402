"""WeNet-style chains, which turn lists, text and any iterable into batches step by step, without cuts."""
