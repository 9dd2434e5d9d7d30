#!/usr/bin/env bash
# What is worth knowing from a GPU that is there for minutes, in two calls of 9 minutes.
#
#     bash tools/first_gpu_run.sh [--cpu] [first] [second]        # default: both, one after the other
#
# first     card, PyTorch and Triton; whether kernels, copies in few bits and a replay work; bytes a
#           second from the host; engines have the tokens of the CPU; 7B after 122,880 tokens: alone,
#           with guesses by its own, 8-bit and 4-bit weights, its 25 most expensive kernels, prefill
#           at three depths; single kernels by graph replay, in GB/s
# second    7B from host memory after 122,880 tokens, then after 32,768; real weights: the text with
#           and without guesses, distributions, all methods; kernels, captured steps and offload next
#           to their oracles; ncu and compute-sanitizer on the kernels, where they are installed
#
# It ends within TOTAL_SECONDS (540), so give it one call. A part that takes too long is interrupted,
# so that it still says what failed, and the next one runs. Each part writes a file of its own at once,
# in the folder gpu_report, in $OUT where that is set. The last file, and the last lines of the screen,
# are a table of all parts and of the lines that begin with RESULT. Without a CUDA device it stops at
# once with exit code 3, unless --cpu asks for a dry run with small shapes. Exit code: parts that
# failed, at most 100.
#
# Nothing is fetched. For real weights MODEL names a model (default: smollm2-135m) and DRAFT its
# drafter.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PIP_NO_INDEX=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 KINETO_LOG_LEVEL=99
CALLS="first second"
deadline=$((SECONDS + ${TOTAL_SECONDS:-540})) grace=${GRACE:-10}
report=${REPORT:-${OUT:-.}/gpu_report}
failed=0 summary="" on_cpu=false device=cuda marked="slow or not slow"

note() { summary+="$1"$'\n'; echo "$1"; }

# What comes in goes to a file, as far as there is room, and its last lines to the screen.
collect() {
    awk '{ n += length($0) + 1; if (n < 2000000) { print; fflush() } }' \
        | { tee "$1" 2> /dev/null; cat > /dev/null; } | tail -n 25
}

# part NAME LIMIT COMMAND...: runs it for so many seconds at most.
part() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code collector
    local file=$report/${name// /_}.txt
    shift 2
    if ((left <= grace)); then
        note "LEFT OUT $name: the time is over"
        failed=$((failed + 1))
        return
    fi
    ((limit < left - grace)) || limit=$((left - grace))
    exec 3> >(collect "$file")
    collector=$!
    echo "== $name (at most $limit s): ${*//$'\n'/; }" | cut -c -300 >&3
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
    summary+=$(grep -a '^RESULT' "$file" 2> /dev/null)$'\n'
}

# tests NAME LIMIT PATH...
tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 -m pytest -v -rsfE --tb=short --maxfail=8 -W default -o addopts= \
        -o faulthandler_timeout=120 -p no:cacheprovider -p no:randomly -m "$marked" "$@"
}

# tool NAME COMMAND...: a part for a program of CUDA's, if it is installed.
tool() {
    if command -v "$2" > /dev/null; then part "$1" 100 "${@:2}"; else note "LEFT OUT $1: no $2"; fi
}

call_first() {
    local times=(--device cuda)
    local shape=(--shape llama2-7b-128k --context 122880 --max-new-tokens 16)
    if $on_cpu; then
        shape=(--shape llama-68m --context 1400 --max-new-tokens 4 --budget 64 --num-recent-tokens 16)
        times=(--device cpu --shape llama-68m --context 300)
    fi
    # The first import of PyTorch reads gigabytes from a cold disk.
    part "environment" 150 python3 -c "$ENVIRONMENT"
    part "boot checks" 100 python3 -c "$CHECKS" $device
    tests "engines" 110 tests/gpu/test_engine_on_cuda.py
    part "7B on chip" 250 python3 -c "$ON_CHIP" --device $device "${shape[@]}"
    part "kernel times" 110 python3 -m tools.bench.kernel_times "${times[@]}"
}

call_second() {
    local model=${MODEL:-smollm2-135m} draft=${DRAFT:-weights/smollm2-135m-draft} tokens=4000 new=48
    local shape=(--shape llama2-7b-128k --context 122880 --context 32768 --offload --on-chip 0)
    if $on_cpu; then
        tokens=300 new=8
        shape=(--shape llama-68m --context 400 --context 300 --budget 64 --num-recent-tokens 16)
    fi
    part "offload" 200 python3 -W default -m tools.bench synthetic --json --method triforce \
        --device $device --max-new-tokens 8 "${shape[@]}"
    local how=(--model "$model" --draft "$draft" --device $device)
    part "selftest" 220 python3 -m minitri selftest "${how[@]}" --max-new-tokens $new --json
    part "methods" 100 python3 -m tools.bench compare "${how[@]}" --max-prompt-tokens $tokens \
        --max-new-tokens $new --seeds 1 --json
    tests "oracles" 150 tests/devices/gpu_twins/test_attention_backends.py \
        tests/devices/gpu_twins/test_quantized_copies.py tests/gpu/test_graphs_on_cuda.py \
        tests/gpu/test_offload_on_cuda.py
    for name in attend_piece multiply_tile; do
        tool "ncu of $name" ncu --clock-control none -k "regex:$name" --launch-count 3 \
            python3 -m tools.bench.kernel_times --device $device
    done
    tool "sanitizer" compute-sanitizer --tool memcheck python3 -m pytest -q -o addopts= \
        tests/devices/gpu_twins/test_attention_backends.py -k as_many_pieces
}

ENVIRONMENT='
import importlib.util, os, platform, shutil, subprocess, torch
print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
names = "triton flash_attn gguf sentencepiece tokenizers transformers pytest xdist hypothesis"
print("there:", *[it for it in names.split() if importlib.util.find_spec(it)])
print("programs:", *[it for it in "gcc g++ cc nvcc ncu compute-sanitizer".split() if shutil.which(it)])
memory = open("/proc/meminfo").read().split()
print("host memory GiB", int(memory[1]) >> 20, "free", os.cpu_count(), "cores")
if torch.cuda.is_available():
    print(torch.cuda.get_device_properties(0), "free, total:", torch.cuda.mem_get_info(0))
    subprocess.run(["nvidia-smi"], timeout=20)
'

# All that a boot checks, each by itself, and what moves bytes.
CHECKS='
import dataclasses, sys, time, torch
from minitri.apps.plan import config_of
from minitri.core.graphs import GraphPool
from minitri.core.settings import BACKENDS, GenerationConfig, SpeculationConfig
from minitri.devices.gpu import attention_backends, fused_modules, quantized_copies
from minitri.devices.gpu.kernels import problem_with
from tools.bench.bandwidth import copy_bandwidth
from tools.bench.synthetic import Setup, random_model

device = torch.device(sys.argv[1])
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32
config = dataclasses.replace(config_of("llama2-7b-128k" if on_gpu else "llama-68m"), num_layers=2)
settings = (SpeculationConfig(), GenerationConfig(), (0.0, 0.0), dtype, device)
model = random_model(config, Setup(config, None, *settings))

def replay():
    x = torch.ones(4, device=device)
    run, y = GraphPool(device).record(lambda: x + 1)
    x += 1
    run()
    assert y.tolist() == [3.0] * 4

def backend(name):
    check = attention_backends.check_backend
    check(attention_backends.make_backend(name), device, dtype, config)

checks = {f"attention {name}": lambda name=name: backend(name) for name in BACKENDS}
checks["compiled kernels"] = lambda: fused_modules.check_kernels(model)
checks |= {f"{n} bits": lambda n=n: quantized_copies.check_kernel(model, n) for n in (8, 4)}
for name, check in checks.items() if on_gpu else [("attention math", lambda: backend("math"))]:
    started = time.perf_counter()
    problem = problem_with(check) or "works"
    print(f"RESULT {name}: {problem}, {time.perf_counter() - started:.1f} s")
if on_gpu:
    print("RESULT a replay:", problem_with(replay) or "works")
for name, hosted in (("copy on the device", False), ("from the host", True)):
    print(f"RESULT {name}: {copy_bandwidth(device, from_host=hosted) / 1e9:.1f} GB/s")
'

# Weights are made up once for all that is measured on chip, with the flags of tools/bench/synthetic.py.
ON_CHIP='
import gc, json, sys, time, torch
from torch.profiler import ProfilerActivity, profile
from minitri.core.errors import InputError
from minitri.core.memory import Models, computing
from minitri.core.offload.streams import synchronize
from minitri.core.prefill import prefill
from minitri.devices.choose import retrieval_copy
from tools.bench.synthetic import build_parser, decode, fresh_session, random_model, setup_of

args = build_parser().parse_args(sys.argv[1:])
setup, [context] = setup_of(args), args.context
target = random_model(setup.target, setup)
draft = random_model(setup.draft, setup) if setup.draft else None

def measure(method, copy=None):
    gc.collect()  # the KV cache of the last run
    found = decode(target, draft, context, setup, method, copy)
    print(json.dumps(found), flush=True)
    return found["ms_per_token"]

with computing(Models(target, target, draft)):
    alone = measure("autoregressive")
    print(f"RESULT alone: {alone:.2f} ms/token", flush=True)
    for weights in ("same", "int8", "int4"):
        try:
            copy = retrieval_copy(target, weights)
        except InputError as error:
            print(f"RESULT guesses by {weights}: {error}")
            continue
        ms, used = measure("triforce", copy), weights
        print(f"RESULT guesses by {weights}: {ms:.2f} ms/token, {alone / ms:.2f} x", flush=True)
    print(f"RESULT weights of the guesses below: {used}")
    session = fresh_session(target, draft, context, setup, "triforce", copy)
    session.start([0])
    for _ in range(3):
        session.step()
    kind = target.device.type
    with profile(activities=[getattr(ProfilerActivity, kind.upper())]) as recorded:
        for _ in range(4):
            session.step()
        synchronize(target.device)
    by = "self_cpu_time_total" if kind == "cpu" else "self_device_time_total"
    averages = recorded.key_averages()
    print(averages.table(sort_by=by, row_limit=25, max_name_column_width=70), flush=True)
    full, text = session.memory.full, session.sequences[0]
    for depth in (0, 0, context // 2, context - 1024):  # the first time libraries are loaded
        full.hold(0, depth, depth)
        synchronize(target.device)
        started = time.perf_counter()
        list(prefill(target, text[: depth + 1025], full, 0, chunk=1024))
        synchronize(target.device)
        seconds = time.perf_counter() - started
        print(f"RESULT prefill of 1,024 tokens after {depth}: {1e3 * seconds:.1f} ms", flush=True)
'

if [[ ${1:-} == --cpu ]]; then
    on_cpu=true device=cpu marked="not slow"  # which takes long on a CPU
    shift
fi
for name in "$@"; do
    if [[ " $CALLS " != *" $name "* ]]; then
        echo "call '$name' is none of $CALLS; name some of these" >&2
        exit 2
    fi
done
mkdir -p "$report" 2> /dev/null
head -c 65536 /dev/zero > "$report/room" 2> /dev/null  # for the summary, if the disk is full by then
trap 'rm -f "$report/room"' EXIT
note "#### $(date -u +%Y-%m-%dT%H:%M:%SZ), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown): ${*:-$CALLS}"
if ! $on_cpu; then
    timeout -s INT --kill-after="$grace" 150 python3 -c \
        'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' < /dev/null 2>&1
    code=$?
    if ((code != 0)); then
        note "no CUDA device that python3's PyTorch can use (exit code $code); --cpu makes a dry run"
        echo "$summary" > "$report/summary.txt"
        exit 3
    fi
fi
for name in ${*:-$CALLS}; do
    "call_$name"
done
rm -f "$report/room"
printf '%s\n%d parts failed\n' "$summary" "$failed" | sed '/^$/d' | tee "$report/summary.txt"
exit $((failed < 100 ? failed : 100))
