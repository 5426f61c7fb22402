"""Pilot runs: a small sample of the input, from which thresholds, rejects, time and cost of the whole are predicted."""
