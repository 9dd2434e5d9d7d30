#!/usr/bin/env bash
# What is worth knowing from a GPU that is there for minutes, in calls that each stand alone.
#
#     bash tools/first_gpu_run.sh [--cpu] CALL...        # in this order: attention weights ...
#
# call       takes     what it learns
# attention  2-6 min   PyTorch, Triton, driver, card; whether every attention backend, compiled kernel
#                      and the int8 kernel equal their oracles there; 7B on chip after 32,768 and
#                      122,880 tokens: milliseconds a token alone and by the cascade
# weights    3-6 min   the same with 8-bit guesses; what each kernel takes by graph replay, in GB/s
# engine     2-6 min   captured steps to the bit, waits a step, offload to the bit, whole engines
# offload    4-8 min   7B from host memory after 32,768 tokens, then after 122,880; page-locking
# real       2-6 min   real weights: the text with and without guesses, distributions, all methods
#
# Each call ends within SECONDS_EACH (540). A part that takes too long is interrupted, so that it
# still says what failed; the next one runs. All output is added to gpu_report.txt, in $OUT where
# that is set, and a summary ends it. Without a CUDA device it stops at once with exit code 3, unless
# --cpu asks for a dry run with small shapes. Exit code: parts that failed, at most 100.
#
# Nothing is fetched. For `real` MODEL names a model (default: smollm2-135m) and DRAFT its drafter;
# or PIECES is a folder of pieces as tools/weight_pieces.py writes them, all there by then.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PIP_NO_INDEX=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
CALLS="attention weights engine offload real"
each=${SECONDS_EACH:-540} grace=${GRACE:-10}
report=${REPORT:-${OUT:-.}/gpu_report.txt}
failed=0 summary="" on_cpu=false

# Writes lines to the screen and, as long as the disk has room, to the report.
say() { tee -a "$report" 2> /dev/null || echo "(the report cannot be written)"; }

note() { summary+="$1"$'\n'; echo "$1" | say; }

# part NAME LIMIT COMMAND...: its output goes to the report, its last lines to the screen.
part() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code=0
    shift 2
    if ((left <= grace)); then
        note "LEFT OUT $name: the time is over"
        failed=$((failed + 1))
        return
    fi
    ((limit < left - grace)) || limit=$((left - grace))
    note "== $name (at most $limit s): $*"
    timeout -s INT --kill-after="$grace" "$limit" "$@" 2>&1 < /dev/null \
        | { head -c 2000000; cat > /dev/null; } | { tee -a "$report" 2> /dev/null; cat > /dev/null; } \
        | tail -n 25
    code=${PIPESTATUS[0]}
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
        -o faulthandler_timeout=120 -p no:cacheprovider "$@"
}

made_up() {
    local name=$1 limit=$2
    shift 2
    if $on_cpu; then
        set -- --shape llama-68m --context 200 --context 300 --budget 64 --new-tokens 2 --device cpu
    else
        set -- --shape llama2-7b-128k --context 32768 --context 122880 "$@"
    fi
    part "$name" "$limit" python3 -W default -m tools.bench --load dummy --method triforce "$@"
}

call_attention() {
    part "environment" 40 python3 -c "$ENVIRONMENT"
    tests "kernels against their oracles" 230 -x $(slow) tests/gpu_twins/test_attention_backends.py \
        tests/gpu_twins/test_fused_modules.py tests/gpu_twins/test_eight_bits.py
    made_up "7B on chip" 250 --new-tokens 16
}

call_weights() {
    made_up "7B on chip, 8-bit guesses" 260 --new-tokens 16 --draft-weights int8
    local sizes=(--device cuda)
    $on_cpu && sizes=(--device cpu --shape llama-68m --context 300)
    part "kernels by graph replay" 130 python3 -m tools.bench.kernel_times "${sizes[@]}"
    made_up "7B on chip, attention of flash" 130 --new-tokens 8 --attention flash
}

call_engine() {
    tests "graphs, waits, offload" 200 $(slow) tests/gpu/test_graphs_on_cuda.py \
        tests/gpu/test_rounds_on_cuda.py tests/gpu/test_offload_on_cuda.py
    tests "engines and distributions" 320 $(slow) tests/gpu/test_engine_on_cuda.py \
        tests/gpu/test_distribution_on_cuda.py
}

call_offload() {
    made_up "7B offloaded" 500 --new-tokens 8 --offload --on-chip 0 --draft-weights int8
}

call_real() {
    local model=${MODEL:-smollm2-135m} draft=${DRAFT:-weights/smollm2-135m-draft} device=cuda
    $on_cpu && device=cpu
    if [[ -n ${PIECES:-} ]]; then
        model=$(mktemp -d)
        part "real weights from pieces" 60 python3 -m tools.weight_pieces --join "$PIECES" "$model"
    fi
    local how=(--model "$model" --draft "$draft" --device $device)
    part "selftest" 220 python3 -m minitri.selftest "${how[@]}" --max-new-tokens 48
    part "methods on real weights" 220 python3 -m minitri.bench --compare "${how[@]}" \
        --prompt-tokens $($on_cpu && echo 300 || echo 4000) --new-tokens 64 --seeds 1
}

# Tests that take long on a CPU are left out of a dry run.
slow() { $on_cpu && echo "-m not\ slow" || echo "-m gpu\ or\ slow\ or\ not\ slow"; }

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
    on_cpu=true
    shift
fi
for name in "$@"; do
    if [[ " $CALLS " != *" $name "* ]]; then
        echo "call '$name' is none of $CALLS; name some of these" >&2
        exit 2
    fi
done
mkdir -p "$(dirname "$report")" 2> /dev/null
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
    deadline=$((SECONDS + each))
    "call_$name"
done
printf '\nSUMMARY, %d parts failed\n%s' "$failed" "$summary" | say
exit $((failed < 100 ? failed : 100))
