#!/usr/bin/env bash
# On a machine with CUDA GPUs: the tests that need one, then the speed of all scripts beside small and large CLIP models (random
# weights, no hub), with one GPU and with all that there are. Writes results/gpu.md and results/gpu.csv; an hour or two.
#
#     benchmarks/gpu.sh
#     MODELS="tiny ViT-B-32" benchmarks/gpu.sh --scripts dqn_clip_cartpole --rounds 2    # what follows goes to throughput.py
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null) || { echo "gpu.sh: error: nvidia-smi finds no GPU" >&2; exit 2; }
page=results/gpu.md
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

measure() { # GPUs to use, options of throughput.py
    echo "measuring with GPU $1"
    CUDA_VISIBLE_DEVICES=$1 python benchmarks/throughput.py --device cuda --models ${MODELS:-tiny ViT-B-32 ViT-L-14 ViT-bigG-14} "${@:2}" |
        tee >(cat >&2) | grep '^|' | sed "s/^|/| $1 |/; 1s/^| $1 |/| GPUs |/; 2s/^| $1 |/|---|/" >"$new/table"
}

{
    echo "# On a GPU"
    echo
    echo "Made by \`benchmarks/gpu.sh\` at commit $(git rev-parse --short HEAD) with PyTorch $(python -c 'import torch; print(torch.__version__)') on:"
    echo
    sed 's/^/- /' <<<"$gpus"
    echo
    echo "## Tests"
    echo
    echo '```'
    python -m pytest -q -rs tests/test_cuda.py 2>&1 | tee >(cat >&2) | tail -n 30 || true
    echo '```'
    echo
    echo "## Speed"
    echo
    echo "Columns as in the README's table; \`tiny\` is the bundled model, the others have random weights."
    echo
} >"$new/page"
measure 0 "$@"
cat "$new/table" >>"$new/page"
count=$(wc -l <<<"$gpus")
if [ "$count" -gt 1 ]; then
    measure "$(seq -s, 0 $((count - 1)))" "$@"
    tail -n +3 "$new/table" >>"$new/page"
fi
grep '^|' "$new/page" | grep -v '^|---' | sed 's/^| *//; s/ *|$//; s/,/;/g; s/ *| */,/g' >results/gpu.csv
mv "$new/page" "$page"
echo "written to $page and results/gpu.csv"
