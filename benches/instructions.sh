#!/usr/bin/env bash
# Instructions per operation at pools of 4 Ki, 64 Ki and 1 Mi blocks, which must agree within 5 %,
# with nanoseconds beside them (for these the larger pools pay in cache misses, not in work).
# Counted by callgrind as the difference of two runs that differ only in how often the operation is
# carried out, so that building and filling the pool cancel out. Needs valgrind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sizes=(4096 65536 1048576)
if ! command -v valgrind >/dev/null; then
  echo "!!! PEER NOT INSTALLED: valgrind. No instruction was counted in this run."
  exit 0
fi
cargo build --quiet --release -p kvyard-bench --bin instructions
program=${CARGO_TARGET_DIR:-target}/release/instructions

# count OPERATION BLOCKS TIMES: all instructions of a run
count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$@" 2>&1 >/dev/null |
    awk '/Collected/ { print $4; found = 1 } END { exit !found }'
}

# The second number is how often in the timed run.
operations=(
  "free_queue 20000 2000000"
  "block_pool 20000 1000000"
  "lookup_hit 400 20000"
  "lookup_miss 20000 2000000"
  "prefill 300 20000"
  "decode 8000 4000000"
)

failed=0
printf '%-12s %10s %14s %12s\n' operation blocks instructions ns
for line in "${operations[@]}"; do
  read -r operation times timed <<<"$line"
  lowest= highest=
  for blocks in "${sizes[@]}"; do
    once=$(count "$operation" "$blocks" "$times")
    twice=$(count "$operation" "$blocks" $((2 * times)))
    each=$(awk -v a="$once" -v b="$twice" -v n="$times" 'BEGIN { printf "%.1f", (b - a) / n }')
    printf '%-12s %10s %14s %12s\n' "$operation" "$blocks" "$each" \
      "$("$program" "$operation" "$blocks" "$timed")"
    lowest=$(printf '%s\n' ${lowest:+"$lowest"} "$each" | sort -g | head -n 1)
    highest=$(printf '%s\n' ${highest:+"$highest"} "$each" | sort -g | tail -n 1)
  done
  if ! awk -v low="$lowest" -v high="$highest" 'BEGIN { exit !(high <= 1.05 * low) }'; then
    echo "$operation: $lowest to $highest instructions differ by more than 5 %" >&2
    failed=1
  fi
done
exit "$failed"
