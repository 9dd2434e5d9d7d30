#!/usr/bin/env bash
# What is worth knowing from a GPU that is there for minutes, in calls that each stand alone.
#
#     bash tools/first_gpu_run.sh [--cpu] CALL...        # in this order: attention weights ...
#
# call       takes     what it learns
# attention  2-6 min   PyTorch, Triton, driver, card; whether every attention backend, compiled kernel
#                      and the int8 kernel equal their oracles there; 7B on chip after 32,768 and
#                      122,880 tokens: milliseconds a token alone and by the cascade
# weights    3-8 min   the same with guesses by 8-bit and by 4-bit weights, and by flash-attn where it
#                      is there; what each kernel takes by graph replay, in GB/s
# engine     2-6 min   captured steps to the bit, waits a step, offload to the bit, whole engines
# offload    4-8 min   7B from host memory after 32,768 tokens, then after 122,880; page-locking
# real       2-6 min   real weights: the text with and without guesses, distributions, all methods
#
# It ends within TOTAL_SECONDS (540), so give it one call, or few. A part that takes too long is
# interrupted, so that it still says what failed, and the next one runs. All output is added to
# gpu_report.txt, in $OUT where that is set, and a summary ends it; on a full disk it takes the place
# that was kept for it. Without a CUDA device it stops at once with exit code 3, unless --cpu asks for
# a dry run with small shapes. Exit code: parts that failed, at most 100.
#
# Nothing is fetched. For `real` MODEL names a model (default: smollm2-135m) and DRAFT its drafter;
# or PIECES, say build/pieces, has what tools/weight_pieces.py wrote; a piece may come with each call.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PIP_NO_INDEX=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
CALLS="attention weights engine offload real"
deadline=$((SECONDS + ${TOTAL_SECONDS:-540})) grace=${GRACE:-10}
report=${REPORT:-${OUT:-.}/gpu_report.txt}
failed=0 summary="" on_cpu=false marked="slow or not slow"

# Writes lines to the screen and, as long as the disk has room, to the report.
say() { tee -a "$report" 2> /dev/null || echo "(the report cannot be written)"; }

note() { summary+="$1"$'\n'; echo "$1" | say; }

# What comes in goes to the report, as far as there is room, and its last lines to the screen.
collect() {
    awk '{ n += length($0) + 1; if (n < 2000000) { print; fflush() } }' \
        | { tee -a "$report" 2> /dev/null; cat > /dev/null; } | tail -n 25
}

# part NAME LIMIT COMMAND...: runs it for so many seconds at most.
part() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code collector
    shift 2
    if ((left <= grace)); then
        note "LEFT OUT $name: the time is over"
        failed=$((failed + 1))
        return
    fi
    ((limit < left - grace)) || limit=$((left - grace))
    local shown=${*//$'\n'/; }
    note "== $name (at most $limit s): ${shown:0:300}"
    exec 3> >(collect)
    collector=$!
    timeout -s INT --kill-after="$grace" "$limit" "$@" >&3 2>&1 3>&- < /dev/null
    code=$?
    exec 3>&-
    # A process that it left behind may still hold its output, and is not waited for.
    timeout 2 tail -s 0.1 --pid="$collector" -f /dev/null
    ((code == 0)) || failed=$((failed + 1))
    case $code in
        124 | 137) note "-- $name: exit code $code, out of time ($((SECONDS - started)) s)" ;;
        *) note "-- $name: exit code $code ($((SECONDS - started)) s)" ;;
    esac
}

tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 -m pytest -v -rsfE --tb=short -W default -o addopts= \
        -o faulthandler_timeout=120 -p no:cacheprovider -m "$marked" "$@"
}

made_up() {
    local name=$1 limit=$2
    shift 2
    if $on_cpu; then
        set -- --shape llama-68m --context 300 --context 400 --max-new-tokens 4 --budget 64 \
            --num-recent-tokens 16 --device cpu
    else
        set -- --shape llama2-7b-128k --context 32768 --context 122880 "$@"
    fi
    part "$name" "$limit" python3 -W default -m tools.bench --load dummy --json --method triforce "$@"
}

call_attention() {
    part "environment" 40 python3 -c "$ENVIRONMENT"
    tests "kernels against their oracles" 230 -x tests/devices/gpu_twins/test_attention_backends.py \
        tests/devices/gpu_twins/test_quantized_copies.py
    made_up "made-up weights on chip" 250 --max-new-tokens 16
}

call_weights() {
    made_up "made-up weights, 4-bit guesses" 150 --max-new-tokens 16 --draft-weights int4
    made_up "made-up weights, 8-bit guesses" 150 --max-new-tokens 16 --draft-weights int8
    local sizes=(--device cuda)
    if $on_cpu; then sizes=(--device cpu --shape llama-68m --context 300); fi
    part "kernels by graph replay" 110 python3 -m tools.bench.kernel_times "${sizes[@]}"
    if python3 -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('flash_attn'))"; then
        made_up "made-up weights, flash attention" 110 --max-new-tokens 8 --attention flash
    fi
}

call_engine() {
    tests "graphs, waits, offload" 200 tests/gpu/test_graphs_on_cuda.py \
        tests/gpu/test_offload_on_cuda.py
    tests "engines" 200 tests/gpu/test_engine_on_cuda.py
}

call_offload() {
    made_up "made-up weights, offloaded" 500 --max-new-tokens 8 --offload --on-chip 0 --draft-weights int8
}

call_real() {
    local model=${MODEL:-smollm2-135m} draft=${DRAFT:-weights/smollm2-135m-draft}
    local device=cuda tokens=4000
    if $on_cpu; then device=cpu tokens=300; fi
    if [[ -n ${PIECES:-} ]]; then
        model=$(mktemp -d)
        part "real weights from pieces" 60 python3 -m tools.weight_pieces --join "$PIECES" "$model"
    fi
    local how=(--model "$model" --draft "$draft" --device $device)
    part "selftest" 220 python3 -m minitri selftest "${how[@]}" --max-new-tokens 48 --json
    part "methods on real weights" 220 python3 -m minitri bench --compare "${how[@]}" \
        --max-prompt-tokens $tokens --max-new-tokens 64 --seeds 1 --json
}

ENVIRONMENT='
import importlib.util, os, platform, shutil, subprocess, torch
print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
names = "triton flash_attn gguf sentencepiece tokenizers transformers pytest xdist hypothesis"
print("there:", *[it for it in names.split() if importlib.util.find_spec(it)])
print("compilers:", *[it for it in ("gcc", "g++", "cc", "nvcc") if shutil.which(it)])
memory = open("/proc/meminfo").read().split()
print("host memory GiB", int(memory[1]) >> 20, "free", os.cpu_count(), "cores")
if torch.cuda.is_available():
    print(torch.cuda.get_device_properties(0), "free, total:", torch.cuda.mem_get_info(0))
    subprocess.run(["nvidia-smi"], timeout=20)
'

if [[ ${1:-} == --cpu ]]; then
    on_cpu=true marked="not slow"  # which takes long on a CPU
    shift
fi
for name in "$@"; do
    if [[ " $CALLS " != *" $name "* ]]; then
        echo "call '$name' is none of $CALLS; name some of these" >&2
        exit 2
    fi
done
mkdir -p "$(dirname "$report")" 2> /dev/null
room=$report.room
[[ -f $report || ! -e $report ]] && head -c 65536 /dev/zero > "$room" 2> /dev/null
trap 'rm -f "$room"' EXIT
echo "#### $(date -u +%Y-%m-%dT%H:%M:%SZ), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown): ${*:-$CALLS}" | say
if ! $on_cpu; then
    timeout -s INT --kill-after="$grace" 60 python3 -c \
        'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' < /dev/null 2>&1 | say
    code=${PIPESTATUS[0]}
    if ((code != 0)); then
        echo "no CUDA device that python3's PyTorch can use (exit code $code); --cpu makes a dry run" | say
        exit 3
    fi
fi
for name in ${*:-$CALLS}; do
    "call_$name"
done
rm -f "$room"
printf '\nSUMMARY, %d parts failed\n%s' "$failed" "$summary" | say
exit $((failed < 100 ? failed : 100))
