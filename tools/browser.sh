#!/bin/sh
# Installs Debian's Chromium for a test of the documentation, as root or with sudo. Where it cannot be had, it is skipped.
set -u
for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
    command -v "$name" >/dev/null && exit 0
done
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
export DEBIAN_FRONTEND=noninteractive
if command -v apt-get >/dev/null && timeout 120 $sudo apt-get update -qq >/dev/null &&
    timeout 240 $sudo apt-get install -qq -y --no-install-recommends chromium >/dev/null; then
    exit 0
fi
echo "browser: no Chromium, and none could be installed: a test of the documentation is skipped" >&2
