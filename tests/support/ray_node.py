"""Settings with which a node of Ray listens on 127.0.0.1 only."""

from __future__ import annotations

# Ray listens on all interfaces unless it takes itself for a cluster of one machine, which this makes it do. It is read
# when Ray is imported.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is gone is noticed within seconds.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000, "include_dashboard": False}
