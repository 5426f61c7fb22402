"""NeMo's multimodal loader with sharmill's datasets: settings, division among ranks and workers, and states."""
