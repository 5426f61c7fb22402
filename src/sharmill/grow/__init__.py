"""Datasets made of finished datasets: merged, split, grown in place, copied to stores. No audio is encoded again."""
