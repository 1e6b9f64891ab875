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
    if [ "$name" = lora-rank ]; then
        for seed in 100 101 102; do
            [ -f "runs/easy-shapes-$seed/result.json" ] || $vitcli train-shapes --difficulty 0.2 \
                --seed "$seed" --lr 1e-3 --warmup 0.1 --set train.clip_grad=null \
                --set encoder.depth=4 --set encoder.hidden=64 --set encoder.heads=2 \
                --set encoder.mlp_hidden=256 --set data.train_size=8192 --set train.batch=16 \
                --out "runs/easy-shapes-$seed" --resume
        done
    fi
    if [ "$name" = distillation ] && [ ! -f runs/fashion-cnn/result.json ]; then
        $vitcli train /usr/share/datasets/fashion-mnist --preset timm:test_efficientnet \
            --set encoder.image_size=28 --set preprocess.resize_size=28 \
            --set 'preprocess.mean=[0.286, 0.286, 0.286]' \
            --set 'preprocess.std=[0.353, 0.353, 0.353]' \
            --set data.crop_scale=null --set data.train_limit=5000 --set data.erase=0 \
            --epochs 10 --batch 128 --lr 2e-3 --warmup 0.05 --set train.weight_decay=0.05 \
            --set train.label_smoothing=0.05 --set train.mixup=0 --set train.cutmix=0 \
            --set train.validate_every=1000 --out runs/fashion-cnn --resume
    fi
    $vitcli sweep "$name" --out "runs/$name" || failed=1
done
"${PYTHON:-python3}" experiments/report.py
exit $failed
