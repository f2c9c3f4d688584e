"""Ray Serve: replicas that each run an engine, behind fronts with the daemon's APIs. Needs `llmbox[ray]`."""
