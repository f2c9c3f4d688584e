"""Telemetry of the machine, engines and requests: one poller, frozen snapshots, history."""
