#!/usr/bin/env bash
# vLLM 0.25.1's own manager and kvyard, side by side in one process on one core. Installs vLLM's Python
# (no compiled operator is needed) into a cache that outlives the checkout; some gigabytes, minutes.
# If that fails it says so, loudly, and ends well: a peer is no part of kvyard.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=0.25.1
peer=${KVYARD_PEER_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/kvyard/vllm-$version}

missing() {
  echo "!!! PEER NOT INSTALLED: vLLM $version: $1"
  echo "!!! Nothing was compared with it in this run."
  exit 0
}

if [ ! -f "$peer/complete" ]; then
  mkdir -p "$peer"
  [ -x "$peer/bin/pip" ] || "${PYTHON:-python3}" -m venv "$peer" || missing "no virtual environment"
  pip=("$peer/bin/pip" install --quiet --disable-pip-version-check)
  "${pip[@]}" --upgrade pip 'maturin>=1.9.4,<2' || missing "pip failed"
  "${pip[@]}" torch==2.13.0 numpy 'setuptools<81' || missing "no torch"
  "${pip[@]}" msgspec pyzmq 'transformers<6' pydantic cachetools cbor2 blake3 psutil pillow regex requests tqdm \
    xxhash einops pyyaml cloudpickle gguf sentencepiece tiktoken fastapi aiohttp prometheus_client \
    partial-json-parser openai mistral_common filelock typing_extensions jsonschema py-cpuinfo protobuf lark \
    diskcache watchfiles python-json-logger setproctitle pybase64 ijson openai-harmony anthropic mcp numba \
    tabulate opencv-python-headless compressed-tensors depyf outlines_core lm-format-enforcer llguidance \
    xgrammar prometheus-fastapi-instrumentator opentelemetry-api opentelemetry-sdk \
    model-hosting-container-standards uvloop || missing "a dependency is not to be had"
  "${pip[@]}" --no-deps torchvision==0.28.0 "vllm==$version" || missing "vLLM itself is not to be had"
  touch "$peer/complete"
fi
# shellcheck disable=SC1091
. "$peer/bin/activate"
maturin develop --release --quiet
export VLLM_PLUGINS=none VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 PYTHONHASHSEED=0
python benches/peers/side_by_side.py "$@"
echo "kvyard's planner beside vLLM's, on random models, and its event stream beside vLLM's:"
KVYARD_DECLARE_TORCHVISION=1 python -m pytest -q tests/peers -W ignore -p no:logging
