"""Report on a run or a dataset: one HTML page with plots and audio, written by ``sharmill report``."""
