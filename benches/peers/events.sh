#!/usr/bin/env bash
# Real routers follow kvyard's event stream: NVIDIA Dynamo's SelectionService, and RadixView. Installs
# them into a cache that outlives the checkout; less than a minute. If that fails it says so, loudly,
# and ends well: a peer is no part of kvyard.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
peer=${KVYARD_PEER_EVENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvyard/event-consumers-1}
trace=${KVYARD_MATERIAL:-../shared}/traces/mooncake_conversation.first1000.jsonl.gz

missing() {
  echo "!!! PEERS NOT INSTALLED: the routers that read KV events: $1"
  echo "!!! Nothing was checked with them in this run."
  exit 0
}

[ -f "$trace" ] || missing "no trace at $trace; set KVYARD_MATERIAL to its folder"
if [ ! -f "$peer/complete" ]; then
  mkdir -p "$peer"
  [ -x "$peer/bin/pip" ] || "${PYTHON:-python3}" -m venv "$peer" || missing "no virtual environment"
  pip=("$peer/bin/pip" install --quiet --disable-pip-version-check)
  "${pip[@]}" --upgrade pip 'maturin>=1.9.4,<2' || missing "pip failed"
  "${pip[@]}" ai-dynamo-runtime==1.6.1 radixview==0.1.0 'pyzmq>=26' || missing "a router is not to be had"
  touch "$peer/complete"
fi
# shellcheck disable=SC1091
. "$peer/bin/activate"
maturin develop --release --quiet
export DYN_LOG=error PYTHONHASHSEED=0
python benches/peers/event_consumers.py "$trace"
