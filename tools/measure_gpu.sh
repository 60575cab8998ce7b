#!/usr/bin/env bash
# Every figure that the book owes to a GPU, each by its own command and with its own time limit, so that one that hangs or
# fails costs no other. From the root of the repository, on a machine with a GPU and with torch, triton and pytest:
#     tools/measure_gpu.sh OUT [STEP ...]
# OUT gets a log for each step, and a JSON file from each benchmark; steps are the names below, all of them if none is
# given (about 15 minutes).
set -uo pipefail
out=${1:?usage: tools/measure_gpu.sh OUT [STEP ...]}
shift
wanted=" ${*:-tests attention latency throughput memory reuse throughput_m6 ladder} "
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

step() { # step NAME LOG SECONDS COMMAND...
    [[ $wanted == *" $1 "* ]] || return 0
    local log=$out/$2.log seconds=$3 status=0 began=$SECONDS
    shift 3
    echo "\$ $*" > "$log"
    timeout "$seconds" "$@" >> "$log" 2>&1 || status=$?
    printf '%-24s status %-3s %4d s\n' "$(basename "$log")" "$status" $((SECONDS - began))
}

bench() { # bench STEP LOG SECONDS ARGUMENTS of `folovllm bench`
    step "$1" "$2" "$3" python3 -m folovllm bench "${@:4}" --save "$out/$2.json"
}

model=(--random-weights qwen3-0.6b)

# Without the command line and packaging, which have nothing to do with a GPU, and tests that need a downloaded model.
step tests tests 300 python3 -m pytest -v -n 14 -p no:cacheprovider tests/m{1,2,3,4,5,6} -m "not model" \
    --ignore tests/m1/test_cli.py --ignore tests/m1/test_packaging.py --ignore tests/m1/test_download.py
step attention attention 120 python3 tools/bench_attention.py
bench latency latency_m1 90 latency --compare m1:model_impl=hf,m1:model_impl=native --repeats 5
bench throughput throughput_m1_m2 120 throughput --compare m1,m2 --limit 30
for milestone in m2 m3 m4; do # one at a time: a slow one takes no other's result with it
    bench memory "memory_$milestone" 150 memory "${model[@]}" --slots 16 --max-model-len 1024 --requests 64 --compare $milestone
done
bench reuse reuse 120 reuse "${model[@]}" --milestone m5 --chunks 4096,2048,1024,512,256,128
bench throughput_m6 throughput_m6 60 throughput "${model[@]}" --workload nano-vllm --repeats 3 --max-num-batched-tokens 16384
bench ladder ladder_h200 240 ladder "${model[@]}" --workload nano-vllm --limit 6 --max-num-batched-tokens 16384
step ladder ladder_chart 60 python3 tools/ladder_chart.py "$out/ladder_h200.json" "$out/ladder_h200.png"
