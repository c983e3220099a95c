#!/usr/bin/env bash
# Generates the committed stubs under foveate/v1 from protos/. Usage: scripts/generate_protos.sh [OUT_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
python="${PYTHON:-.venv/bin/python}"
bin="$(cd "$(dirname "$python")" && pwd)"
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" protos/foveate/v1/*.proto
touch "$out/foveate/v1/__init__.py"
