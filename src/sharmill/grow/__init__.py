"""Datasets made of finished datasets: merged, split by speaker, and grown in place. No audio is encoded again."""
