#!/usr/bin/env bash
# Gate a change in CI: fail the job if the change costs loss, or if the runs cannot tell.
#
#   examples/gate_in_ci.sh LOGS [BASELINE]
#
# LOGS has a log per run, named ARM-SEED.EXTENSION: main-0.jsonl, main-1.jsonl, change-0.jsonl, change-1.jsonl. Any format
# of `compare --from` works. BASELINE is the arm to compare with (default: main). Keep LOGS/compare between jobs: repeated
# attempts then share the error of one verdict (docs/howto/gate_in_ci.md).
set -u
logs=${1:?usage: gate_in_ci.sh LOGS [BASELINE]}
baseline=${2:-main}

lightning-llm compare --from "$logs"/*-[0-9]*.* --pattern '{arm}-{seed}.*' --baseline "$baseline" \
  --require lossless --output "$logs/compare"
code=$?
case $code in
  0) echo "gate: passed, the change is lossless" ;;
  1) echo "gate: failed, the change costs loss" ;;
  3) echo "gate: open, too few seeds to tell; run more, or use --require not-lossy" ;;
  *) echo "gate: the logs cannot be judged" ;;
esac
exit $code
