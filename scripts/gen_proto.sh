#!/usr/bin/env bash
# Regenerates the committed gRPC stubs in triptych/wire/v1 from proto/. CI fails when the result differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
rm -f triptych/wire/v1/*_pb2.py triptych/wire/v1/*_pb2.pyi triptych/wire/v1/*_pb2_grpc.py
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I proto \
  --python_out=. --pyi_out=. --grpc_python_out=. proto/triptych/wire/v1/*.proto
touch triptych/wire/__init__.py triptych/wire/v1/__init__.py
