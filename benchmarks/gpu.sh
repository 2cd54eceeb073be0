#!/usr/bin/env bash
# On a machine with CUDA GPUs: the tests that need one, then the speed of all scripts beside small and large CLIP models
# (random weights, no hub), with one GPU and with all in sight (CUDA_VISIBLE_DEVICES holds). Writes results/gpu.md, row
# by row, and results/gpu.csv; an hour or two. What fails is named there, and the rest goes on.
#
#     benchmarks/gpu.sh
#     MODELS="tiny ViT-B-32" benchmarks/gpu.sh --scripts dqn_clip_cartpole --rounds 2    # what follows: for throughput
set -uo pipefail
cd "$(dirname "$0")/.." || exit
names=$(python -c 'import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep="\n")')
[ -n "$names" ] || { echo "gpu.sh: error: PyTorch sees no GPU" >&2; exit 2; }
count=$(wc -l <<<"$names")
all=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((count - 1)))}
page=results/gpu.md
failed=

measure() { # GPUs to use, how many these are, the first two lines of the table (sed), options of throughput
    echo "measuring with GPU $1" >&2
    CUDA_VISIBLE_DEVICES=$1 python -m benchmarks.throughput --device cuda --models ${MODELS:-tiny ViT-B-32 ViT-L-14 ViT-bigG-14} "${@:4}" |
        tee >(cat >&2) | grep --line-buffered '^|' | sed -u "s/^|/| $2 |/; $3" >>"$page" ||
        failed+=" the speed with $2 of the GPUs;"
}

{
    echo "# On a GPU"
    echo
    echo "Made by \`benchmarks/gpu.sh\` at commit $(git rev-parse --short HEAD) with PyTorch $(python -c 'import torch; print(torch.__version__)') on:"
    echo
    sed 's/^/- /' <<<"$names"
    echo
    echo "## Tests"
    echo
    echo '```'
    python -m pytest -q -rs --slow tests/test_cuda.py 2>&1 | tee >(cat >&2) | tail -n 30 || failed+=" the tests;"
    echo '```'
    echo
    echo "## Speed"
    echo
    echo "Columns as in the README's table; \`tiny\` is the bundled model, the others have random weights."
    echo
} >"$page"
measure "${all%%,*}" 1 '1s/^| 1 |/| GPUs |/; 2s/^| 1 |/|---|/' "$@"
if [ "$count" -gt 1 ]; then
    measure "$all" "$count" '1,2d' "$@"
fi
[ -z "$failed" ] || printf '\nFailed, in whole or in part:%s see above.\n' "$failed" >>"$page"
grep '^|' "$page" | grep -v '^|---' | sed 's/^| *//; s/ *|$//; s/,/;/g; s/ *| */,/g' >results/gpu.csv
echo "written to $page and results/gpu.csv"
[ -z "$failed" ]
