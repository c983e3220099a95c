#!/usr/bin/env bash
# Checks the GPU paths on one card and times them, in under 8 minutes: GPU tests, draft and verify steps, attaching by CUDA IPC.
# The last line is one JSON object; without a GPU it is {"gpu": null} and the exit status is 0.
# Use: bench/gpu_check.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device: nothing to check."
    echo '{"gpu": null}'
    exit 0
fi
status=0
timeout 240 "$python" -m pytest tests/gpu -q -p no:cacheprovider || status=$?
timeout 200 "$python" -m bench.gpu_check --tests-status "$status"
exit "$status"
