#!/usr/bin/env bash
# Runs every sweep of this folder, one after the other, and then writes the report.
#
#   experiments/run.sh                   everything: about an hour and a half on two cores
#   experiments/run.sh pooling position  these sweeps
#
# Cut it off at any moment and run it again: it does what is missing. VITCLI is the program to run.
set -euo pipefail
cd "$(dirname "$0")/.."
vitcli=${VITCLI:-vitcli}

sweeps=("$@")
if [ ${#sweeps[@]} -eq 0 ]; then
    for file in vitcli/commands/sweep/shipped/*.yaml; do
        sweeps+=("$(basename "$file" .yaml)")
    done
fi
failed=0
for name in "${sweeps[@]}"; do
    if [ "$name" = lora-rank ] && [ ! -f runs/easy-shapes/result.json ]; then
        $vitcli train-shapes --difficulty 0.2 --lr 1e-3 --set encoder.depth=12 \
            --set data.train_size=16384 --set data.val_size=2048 \
            --set train.clip_grad=null --out runs/easy-shapes --resume
    fi
    $vitcli sweep "$name" --out "runs/$name" || failed=1
done
"${PYTHON:-python3}" experiments/report.py
exit $failed
