"""Buckets from the lengths of cuts, and the largest batch of each that fits in memory."""
