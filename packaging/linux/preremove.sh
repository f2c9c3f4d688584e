#!/bin/sh
# A removal (deb: "remove", rpm: 0 versions left) stops the service; an upgrade does not. Models, keys and
# settings stay: `llmbox uninstall` removes those.
set -e
case "$1" in
    remove | 0)
        if [ -d /run/systemd/system ] && [ -f /etc/systemd/system/llmbox.service ]; then
            systemctl disable --now llmbox.service || true
        fi
        ;;
esac
