"""Operations of the daemon that routes call: models in memory and on disk, settings, identity."""
