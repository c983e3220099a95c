#!/bin/bash
# Runs the verifier, the drafter, or both in one container: two processes that share a GPU, /dev/shm and the IPC namespace.
# Flags come as FOVEATE_* variables; FOVEATE_MODEL is the checkpoint's folder. When one process ends, so does the other.
set -euo pipefail

verifier=(python -m verifier_svc.main --address "${VERIFIER_ADDRESS:-0.0.0.0:50051}"
  --metrics-address "${VERIFIER_METRICS:-0.0.0.0:9464}")
drafter=(python -m drafter_svc.main --address "${DRAFTER_ADDRESS:-0.0.0.0:50052}"
  --metrics-address "${DRAFTER_METRICS:-0.0.0.0:9465}")

case "${1:-both}" in
  verifier) exec "${verifier[@]}" "${@:2}" ;;
  drafter) exec "${drafter[@]}" "${@:2}" ;;
  both)
    "${verifier[@]}" & verifier_pid=$!
    "${drafter[@]}" & drafter_pid=$!
    # The reader of shared memory goes before its owner.
    trap 'kill -TERM "$drafter_pid" 2>/dev/null; wait "$drafter_pid"; kill -TERM "$verifier_pid" 2>/dev/null' TERM INT
    status=0
    wait -n || status=$?
    kill -TERM "$drafter_pid" "$verifier_pid" 2>/dev/null || true
    wait
    exit "$status"
    ;;
  *) echo "foveate-engine: verifier, drafter or both, not $1" >&2; exit 2 ;;
esac
