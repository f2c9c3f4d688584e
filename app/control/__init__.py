"""What routes call to control the daemon: models in memory and on disk, settings, and who it is."""
