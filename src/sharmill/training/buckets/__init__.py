"""Buckets from the lengths of cuts, and the largest batch per bucket that fits in memory."""
