#!/bin/sh
# After an upgrade, a service that runs is started again on the new version.
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    systemctl try-restart llmbox.service || true
fi
