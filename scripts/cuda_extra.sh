#!/usr/bin/env bash
# Prints the extra whose wheels this machine's NVIDIA driver runs: cuda13 from driver 580 on, else cuda12.
set -euo pipefail
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 || true)
if [ "${driver:-580}" -ge 580 ]; then echo cuda13; else echo cuda12; fi
