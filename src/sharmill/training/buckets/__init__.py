"""Estimation of buckets from the lengths of cuts, and of the largest batch per bucket that fits in memory."""
