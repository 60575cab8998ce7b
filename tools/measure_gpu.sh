#!/usr/bin/env bash
# Every figure that the book owes to a GPU, each by its own command and with its own time limit, so that one that hangs or
# fails costs no other. From the root of the repository, on a machine with a GPU and with torch, triton and pytest:
#     tools/measure_gpu.sh OUT [STEP ...]
# OUT gets a log for each step, and a JSON file from each benchmark; steps are the names below, those of the milestones if
# none is given (about 15 minutes); of the electives there are: electives bits drafts experts; of a start and few requests: few.
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

# Without tests that need a downloaded model.
step tests tests 300 python3 -m pytest -v -n 14 -p no:cacheprovider tests/m{1,2,3,4,5,6} -m "not model"
step attention attention 120 python3 -m tools.bench_attention
bench latency latency_m1 90 latency --compare m1:model_impl=hf,m1:model_impl=native --repeats 5
bench throughput throughput_m1_m2 120 throughput --compare m1,m2 --limit 30
for milestone in m2 m3 m4; do # one at a time: a slow one takes no other's result with it
    bench memory "memory_$milestone" 150 memory "${model[@]}" --slots 16 --max-model-len 1024 --requests 64 --compare $milestone
done
bench reuse reuse 120 reuse "${model[@]}" --milestone m5 --chunks 4096,2048,1024,512,256,128
bench throughput_m6 throughput_m6 60 throughput "${model[@]}" --workload nano-vllm --repeats 3 --max-num-batched-tokens 16384
bench ladder ladder_h200 240 ladder "${model[@]}" --workload nano-vllm --limit 6 --max-num-batched-tokens 16384
step ladder ladder_chart 60 python3 tools/chart.py "$out/ladder_h200.json" "$out/ladder_h200.png"
step electives electives 400 python3 -m pytest -v -n 14 -p no:cacheprovider tests/x1/test_deferred_sampling.py tests/x2 tests/x3 tests/x4 \
    tests/builders -m gpu
bench bits bits_throughput 240 throughput "${model[@]}" --workload nano-vllm --max-num-batched-tokens 16384 \
    --compare m6,m6:kv_cache_dtype=fp8,m6:quantization=fp8:kv_cache_dtype=fp8
for geometry in qwen3-4b qwen3-0.6b; do
    step bits "bits_steps_$geometry" 200 python3 tools/measure_step.py --geometry $geometry \
        --compare m6,m6:quantization=fp8,m6:quantization=int8,m6:quantization=int4 --kinds plain --num-seqs 1 256 --rounds 1 --prompts 8x2048
done
step bits bits_both 120 python3 tools/measure_step.py --geometry qwen3-4b \
    --compare m6,m6:quantization=fp8:quantize_activations=true --kinds plain --num-seqs 1 256 --rounds 1 --prompts 8x2048
drafts=(python3 -m tools.measure_speculation --batches 1 16)
for small in stories-5m smollm2; do
    step drafts "drafts_$small" 200 "${drafts[@]}" --model $small --methods ngram+suffix ngram --tokens 15 --rounds 3
done
step drafts drafts_draft 120 "${drafts[@]}" --methods draft_model --tokens 12 --rounds 3
step drafts drafts_draft_fixed 120 "${drafts[@]}" --methods draft_model --tokens 12 --rounds 3 --fixed
step drafts drafts_checks 200 python3 -m tools.bench_attention --verify
step few few_start 200 python3 tools/measure_start.py
step few few_referee 240 python3 tools/referee.py
step few few_steps 60 python3 tools/measure_step.py --num-seqs 1 2 4 16 --kinds plain
step experts experts_layer 120 python3 -m tools.bench_experts
bench experts experts_latency 200 latency --random-weights qwen3-30b-a3b --repeats 3 --milestone m6
bench experts experts_throughput 240 throughput --random-weights qwen3-30b-a3b --workload nano-vllm --max-num-batched-tokens 16384
