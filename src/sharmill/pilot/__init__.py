"""Pilot runs, which predict thresholds, rejects, time and cost for the whole input from a small sample of it."""
