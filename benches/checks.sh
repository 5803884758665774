#!/usr/bin/env bash
# What the ownership checks and the history of operations cost: the same operations in a build with
# `--cfg kvyard_unchecked` (a bench aid, never shipped) and in the one that ships. Fails if decoding or a
# lookup takes more than 10 % more instructions, which valgrind counts. Times are medians of rounds that
# alternate between the two builds; they are shown, not judged, for a busy machine moves them more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

blocks=65536
rounds=${1:-9}
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --release -p kvyard-bench --bin instructions
RUSTFLAGS="${RUSTFLAGS:-} --cfg kvyard_unchecked" \
  cargo build --quiet --release -p kvyard-bench --bin instructions --target-dir "$target/unchecked"
checked=$target/release/instructions
unchecked=$target/unchecked/release/instructions

# count PROGRAM OPERATION TIMES: instructions of one operation
count() {
  local times
  for times in "$3" $((2 * $3)); do
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$1" "$2" "$blocks" "$times" 2>&1 >/dev/null |
      awk '/Collected/ { print $4 }'
  done | awk -v n="$3" 'NR == 1 { once = $1 } NR == 2 { print ($1 - once) / n }'
}

median() { sort -g | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }
share() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f", (a / b - 1) * 100 }'; }

counts=1
if ! command -v valgrind >/dev/null; then
  echo "!!! PEER NOT INSTALLED: valgrind. No instruction was counted in this run."
  counts=0
fi

failed=0
printf '%-12s %12s %12s %10s %12s\n' operation unchecked checked "more %" "time more %"
for line in "decode 8000 1000000" "lookup_hit 400 10000" "prefill 300 3000"; do
  read -r operation counted timed <<<"$line"
  with=() without=()
  for ((round = 0; round < rounds; round++)); do
    without+=("$("$unchecked" "$operation" "$blocks" "$timed")")
    with+=("$("$checked" "$operation" "$blocks" "$timed")")
  done
  plain=$(printf '%s\n' "${without[@]}" | median)
  guarded=$(printf '%s\n' "${with[@]}" | median)
  in_time=$(share "$guarded" "$plain")
  if [ "$counts" = 0 ]; then
    printf '%-12s %12s %12s %10s %12s  ns\n' "$operation" "$plain" "$guarded" - "$in_time"
    continue
  fi
  plain=$(count "$unchecked" "$operation" "$counted")
  guarded=$(count "$checked" "$operation" "$counted")
  more=$(share "$guarded" "$plain")
  printf '%-12s %12s %12s %10s %12s  instructions\n' "$operation" "$plain" "$guarded" "$more" "$in_time"
  if [ "$operation" != prefill ] && awk -v m="$more" 'BEGIN { exit !(m > 10) }'; then
    echo "$operation: the checks cost $more %, more than 10 %" >&2
    failed=1
  fi
done
exit "$failed"
