"""Replicas that run now, as the router of this process knows them.

A handle does not show its router, and who owns the handle must know whether any replica runs. Ray copies the
router's own module by value, so its globals are not shared: this module's are.
"""

RUNNING: dict[str, dict[str, str]] = {}
"""Fingerprint of each running replica, by deployment."""
