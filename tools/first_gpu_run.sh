#!/usr/bin/env bash
# The first session on a GPU: what is worth knowing, the most important parts first, in one report.
#
#     bash tools/first_gpu_run.sh [REPORT] [SECONDS]       # gpu_report.txt, 590
#
# Every part has a time limit of its own, and none begins when the time is over, so it ends by itself
# within ten minutes even if a command hangs. The exit code is the number of parts that failed.
# MODEL names a model with real weights, by default smollm2-135m; parts that find none fail with a
# line. Runs on a CPU, too, where parts that need a GPU are left out.
set -uo pipefail
cd "$(dirname "$0")/.."
report=${1:-gpu_report.txt}
deadline=$((SECONDS + ${2:-590}))
model=${MODEL:-smollm2-135m}
failed=0
export PYTHONUNBUFFERED=1

say() { echo "$@" | tee -a "$report"; }

# part NAME LIMIT COMMAND...: its output goes to the report, its last lines to the screen.
part() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code=0
    shift 2
    if ((left < 10)); then
        say "LEFT OUT $name: the time is over"
        failed=$((failed + 1))
        return
    fi
    say "== $name: $*"
    timeout --kill-after=5 $((limit < left - 5 ? limit : left - 5)) "$@" 2>&1 \
        | tee -a "$report" | tail -n 15 || code=$?
    ((code == 0)) || failed=$((failed + 1))
    say "-- $name: exit code $code ($((SECONDS - started)) s)"
}

gpu_part() {
    if $has_gpu; then part "$@"; else say "LEFT OUT $1: it needs a GPU"; fi
}

: > "$report"
say "commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), $(date -u +%Y-%m-%dT%H:%MZ)"
python -c 'import torch, platform; print("Python", platform.python_version(), "torch", torch.__version__)' \
    | tee -a "$report"
has_gpu=false
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && has_gpu=true
if $has_gpu; then nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee -a "$report"; fi

big=(--load dummy --shape llama2-7b-128k --context 122880 --method triforce --new-tokens 48 --repeats 1)
part "tests on the device" 180 python -m pytest -q -rN --maxfail=10 tests/gpu
gpu_part "attention and other kernels against their oracles" 90 \
    python -m pytest -q -m "slow or not slow" tests/gpu_twins/test_attention_backends.py \
    tests/gpu_twins/test_fused_modules.py tests/gpu_twins/test_quantized_copies.py
part "selftest" 110 python -m minitri.selftest --model "$model" --max-new-tokens 48
gpu_part "7B at 122,880 tokens, on chip" 120 python -m tools.bench "${big[@]}"
gpu_part "the same with 8 bits for guesses" 100 python -m tools.bench "${big[@]}" --draft-weights int8
gpu_part "the same, offloaded" 150 python -m tools.bench "${big[@]}" --offload --on-chip 0
part "methods on real weights" 120 python -m minitri.bench --compare --model "$model" \
    --prompt-tokens 4000 --new-tokens 64 --seeds 1 --quiet
for backend in triton flash; do
    gpu_part "attention $backend" 60 python -m tools.bench "${big[@]}" --attention $backend
done
say "$failed parts failed; the whole report is $report"
exit $failed
