"""Use of sharmill's datasets in NeMo's multimodal loader: settings, division among ranks and workers, and states."""
