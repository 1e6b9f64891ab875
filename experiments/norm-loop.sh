#!/usr/bin/env bash
# Scripted use without a sweep's file: a loop over `vitcli … --json`, read as JSON, one line per run.
#
#   experiments/norm-loop.sh                             the 2x2 table, about a minute
#   experiments/norm-loop.sh --set data.train_size=4096  any option of train-shapes
#   NORMS=post WARMUPS="0 0.05 0.1 0.2" experiments/norm-loop.sh
#
# VITCLI is the program to run; jq is used where it is installed, else python3.
set -euo pipefail
vitcli=${VITCLI:-vitcli}

fields() { # the fields of .result that are named, separated by tabs
    if command -v jq >/dev/null; then
        jq -r --args '.result as $r | [$ARGS.positional[] | $r[.]] | @tsv' "$@"
    else
        python3 -c 'import json, sys
result = json.load(sys.stdin)["result"]
print(*(result[name] for name in sys.argv[1:]), sep="\t")' "$@"
    fi
}

printf 'norm\twarmup\tval_accuracy\tverdict\n'
for norm in ${NORMS:-pre post}; do
    for warmup in ${WARMUPS:-0 0.25}; do
        printf '%s\t%s\t' "$norm" "$warmup"
        # shellcheck disable=SC2086  # VITCLI may be several words
        $vitcli train-shapes --norm "$norm" --warmup "$warmup" --json "$@" |
            fields val_accuracy verdict
    done
done
