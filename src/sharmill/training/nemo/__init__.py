"""NeMo's multimodal loader over our datasets: settings, who reads what, states."""
