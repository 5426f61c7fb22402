"""Datasets made from finished datasets: merged, split, appended in place, or copied to stores. No audio is encoded."""
