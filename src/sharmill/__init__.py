"""sharmill: speech manifests to training-ready Lhotse Shar datasets, on one machine or a cluster."""

__version__ = "0.1.0"
