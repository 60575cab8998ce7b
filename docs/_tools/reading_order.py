"""Writes docs/reading_order.md: `python docs/_tools/reading_order.py`. Lines are counted, exercises come from the manifests."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_A_MINUTE = 12

# milestone: (our file, nano-vLLM's under nanovllm/, vLLM's under vllm/); "" where there is none
ORDER: dict[str, list[tuple[str, str, str]]] = {
    "m1": [
        ("llm.py", "llm.py", "entrypoints/llm.py"),
        ("config.py", "config.py", "config/"),
        ("engine/setup.py", "", ""),
        ("sampling_params.py", "sampling_params.py", "sampling_params.py"),
        ("engine/inputs.py", "", "inputs/llm.py"),
        ("outputs.py", "", "outputs.py"),
        ("step/schedule.py", "", "v1/core/sched/output.py"),
        ("request.py", "engine/sequence.py", "v1/request.py"),
        ("engine/input_processor.py", "", "v1/engine/input_processor.py"),
        ("engine/llm_engine.py", "engine/llm_engine.py", "v1/engine/llm_engine.py"),
        ("build.py", "", ""),
        ("engine/core.py", "engine/llm_engine.py", "v1/engine/core.py"),
        ("engine/events.py", "", ""),
        ("engine/event_stream.py", "", ""),
        ("engine/serial_scheduler.py", "", ""),
        ("engine/stop.py", "engine/scheduler.py", "v1/core/sched/utils.py"),
        ("engine/detokenizer.py", "", "v1/engine/detokenizer.py"),
        ("engine/output_processor.py", "", "v1/engine/output_processor.py"),
        ("executor/abstract.py", "", "v1/executor/abstract.py"),
        ("executor/gpu_executor.py", "", "v1/executor/uniproc_executor.py"),
        ("worker/runner.py", "", ""),
        ("worker/gpu_worker.py", "engine/model_runner.py", "v1/worker/gpu_worker.py"),
        ("worker/hf_model_runner.py", "", ""),
        ("sample/sampler.py", "layers/sampler.py", "v1/sample/sampler.py"),
        ("sample/rows.py", "", "v1/sample/metadata.py"),
        ("sample/filters.py", "", "v1/sample/ops/topk_topp_sampler.py"),
        ("sample/noise.py", "", ""),
        ("step/forward_batch.py", "utils/context.py", "forward_context.py"),
        ("attention/backends/abstract.py", "", "v1/attention/backend.py"),
        ("layers/attention.py", "layers/attention.py", ""),
        ("attention/ops.py", "", ""),
        ("attention/backends/torch_cat.py", "", ""),
        ("worker/serial_model_runner.py", "", ""),
        ("layers/linear.py", "layers/linear.py", "model_executor/layers/linear.py"),
        ("layers/layer_set.py", "", ""),
        ("layers/layernorm.py", "layers/layernorm.py", "model_executor/layers/layernorm.py"),
        ("layers/rotary_embedding.py", "layers/rotary_embedding.py", "model_executor/layers/rotary_embedding/"),
        ("layers/activation.py", "layers/activation.py", "model_executor/layers/activation.py"),
        ("layers/embed_head.py", "layers/embed_head.py", "model_executor/layers/vocab_parallel_embedding.py"),
        ("models/model_config.py", "", ""),
        ("models/llama.py", "", "model_executor/models/llama.py"),
        ("models/qwen3.py", "models/qwen3.py", "model_executor/models/qwen3.py"),
        ("models/registry.py", "", "model_executor/models/registry.py"),
        ("models/loader.py", "utils/loader.py", "model_executor/model_loader/default_loader.py"),
    ],
    "m2": [
        ("engine/build_batch.py", "", ""),
        ("engine/scheduler.py", "engine/scheduler.py", "v1/core/sched/scheduler.py"),
        ("cache/manager.py", "", "v1/core/kv_cache_manager.py"),
        ("cache/slot_manager.py", "", ""),
        ("worker/input_batch.py", "engine/model_runner.py", "v1/worker/gpu_input_batch.py"),
        ("worker/model_runner.py", "engine/model_runner.py", "v1/worker/gpu_model_runner.py"),
        ("worker/warm_up.py", "engine/model_runner.py", "v1/worker/gpu_model_runner.py"),
        ("attention/backends/torch_naive.py", "", ""),
    ],
    "m3": [
        ("cache/block_manager.py", "engine/block_manager.py", "v1/core/block_pool.py"),
        ("apps/inspector/watcher.py", "", ""),
        ("worker/kv_memory.py", "engine/model_runner.py", "v1/core/kv_cache_utils.py"),
        ("attention/backends/torch_paged.py", "", ""),
    ],
    "m4": [
        ("kernels/online_softmax.py", "", ""),
        ("kernels/store.py", "layers/attention.py", "v1/attention/ops/triton_reshape_and_cache_flash.py"),
        ("kernels/prefill.py", "", "v1/attention/ops/triton_unified_attention.py"),
        ("kernels/decode_plan.py", "", ""),
        ("kernels/decode.py", "", "v1/attention/ops/triton_unified_attention.py"),
        ("attention/backends/triton.py", "", "v1/attention/backends/triton_attn.py"),
        ("attention/backends/flash_attn.py", "layers/attention.py", "v1/attention/backends/flash_attn.py"),
        ("kernels/rms_norm.py", "", ""),
        ("kernels/qk_norm_rope.py", "", ""),
        ("kernels/activation.py", "", ""),
        ("models/kernel_layers.py", "", ""),
        ("models/fused.py", "", ""),
    ],
    "m5": [
        ("cache/prefix_cache.py", "engine/block_manager.py", "v1/core/kv_cache_utils.py"),
    ],
    "m6": [
        ("engine/build_packed.py", "", ""),
        ("worker/step_graph.py", "engine/model_runner.py", "compilation/cuda_graph.py"),
        ("worker/graph_runner.py", "engine/model_runner.py", "v1/worker/gpu_model_runner.py"),
        ("worker/pending_step.py", "", ""),
        ("step/packed.py", "", ""),
        ("worker/buckets.py", "", "v1/worker/gpu/cudagraph_utils.py"),
        ("worker/device_tables.py", "", "v1/worker/gpu/block_table.py"),
        ("worker/step_sampler.py", "layers/embed_head.py", "model_executor/layers/logits_processor.py"),
        ("sample/sampling_row.py", "", "v1/worker/gpu/sample/states.py"),
        ("sample/sampler_state.py", "", "v1/worker/gpu/sample/sampler.py"),
        ("sample/logprobs.py", "", "v1/worker/gpu/sample/logprob.py"),
        ("executor/packed_executor.py", "", ""),
        ("kernels/unpack_step.py", "", ""),
        ("kernels/skinny_linear.py", "", ""),
        ("kernels/prefetching_decode.py", "", ""),
        ("models/fused_layer.py", "", ""),
        ("kernels/variants.py", "", ""),
        ("electives/hopper/prefill.py", "", ""),
        ("kernels/dry_run.py", "", ""),
        ("worker/dry_run.py", "", ""),
        ("engine/overlap.py", "", "v1/core/sched/async_scheduler.py"),
        ("engine/detokenizer_stream.py", "", "v1/engine/detokenizer.py"),
        ("kernels/gumbel_max.py", "layers/sampler.py", "v1/worker/gpu/sample/gumbel.py"),
        ("kernels/sample_tokens.py", "", "v1/worker/gpu/sample/sampler.py"),
        ("kernels/penalties.py", "", "v1/worker/gpu/sample/penalties.py"),
        ("kernels/filter_logits.py", "", ""),
        ("distributed/sharding.py", "layers/linear.py", "model_executor/layers/linear.py"),
        ("layers/sharded.py", "layers/embed_head.py", "model_executor/layers/vocab_parallel_embedding.py"),
        ("layers/fusable.py", "", ""),
        ("layers/rope_scaling.py", "", ""),
        ("models/sharded_loader.py", "", ""),
        ("models/extra_tensors.py", "", ""),
        ("models/given_tensors.py", "", ""),
        ("models/random_weights.py", "", ""),
        ("distributed/group.py", "", "distributed/parallel_state.py"),
        ("distributed/one_shot_buffers.py", "", "distributed/device_communicators/custom_all_reduce.py"),
        ("kernels/summed_linear.py", "", ""),
        ("executor/messages.py", "", ""),
        ("executor/ring.py", "engine/model_runner.py", "distributed/device_communicators/shm_broadcast.py"),
        ("executor/rank.py", "engine/model_runner.py", "v1/executor/multiproc_executor.py"),
        ("executor/start.py", "", ""),
        ("executor/multiproc_executor.py", "engine/model_runner.py", "v1/executor/multiproc_executor.py"),
    ],
    "x1": [
        ("electives/server/messages.py", "", "v1/engine/__init__.py"),
        ("electives/server/engine_loop.py", "", "v1/engine/core.py"),
        ("electives/server/aggregator.py", "", ""),
        ("electives/server/transport.py", "", "v1/engine/core_client.py"),
        ("electives/server/engine_process.py", "", "v1/engine/utils.py"),
        ("electives/server/stream.py", "", "v1/engine/output_processor.py"),
        ("electives/server/async_engine.py", "", "v1/engine/async_llm.py"),
        ("electives/server/admission.py", "", ""),
        ("electives/server/sse.py", "", ""),
        ("electives/server/response_handler.py", "", ""),
        ("electives/server/replies.py", "", "entrypoints/openai/completion/serving.py"),
        ("electives/server/protocol.py", "", "entrypoints/openai/completion/protocol.py"),
        ("electives/server/requests.py", "", "entrypoints/openai/completion/protocol.py"),
        ("electives/server/http.py", "", ""),
        ("electives/server/app.py", "", "entrypoints/openai/api_server.py"),
        ("electives/server/errors.py", "", ""),
        ("electives/server/metrics.py", "", "v1/metrics/loggers.py"),
        ("electives/server/listener.py", "", ""),
        ("electives/server/serve.py", "", "entrypoints/openai/api_server.py"),
        ("electives/structured_output/choice.py", "", ""),
    ],
    "x2": [
        ("electives/quantization/quantizer/groups.py", "", "model_executor/layers/quantization/utils/quant_utils.py"),
        ("electives/quantization/packing.py", "", "model_executor/layers/quantization/utils/quant_utils.py"),
        ("electives/quantization/config.py", "", "model_executor/layers/quantization/__init__.py"),
        ("electives/quantization/weight.py", "", ""),
        ("electives/quantization/layouts.py", "", "model_executor/layers/quantization/auto_awq.py"),
        ("electives/quantization/linear_method.py", "", ""),
        ("electives/quantization/fp8.py", "", "model_executor/layers/quantization/fp8.py"),
        ("electives/quantization/int4.py", "", "model_executor/layers/quantization/auto_gptq.py"),
        ("electives/quantization/kernels/int4_linear.py", "", ""),
        ("electives/quantization/kernels/quant_matmul.py", "", ""),
        ("electives/quantization/kernels/fp8_linear.py", "", ""),
        ("step/kv_format.py", "", "model_executor/layers/quantization/kv_cache.py"),
        ("electives/quantization/calibrate.py", "", ""),
        ("kernels/fp8_cache.py", "", ""),
        ("attention/backends/decoded.py", "", ""),
        ("electives/quantization/quantizer/run.py", "", ""),
        ("electives/quantization/quantizer/one_layer.py", "", ""),
        ("electives/quantization/quantizer/gptq.py", "", ""),
        ("electives/quantization/quantizer/awq.py", "", ""),
        ("electives/quantization/quantizer/methods.py", "", ""),
        ("electives/quantization/quantizer/perplexity.py", "", ""),
    ],
    "x3": [
        ("electives/spec_decode/proposer.py", "", ""),
        ("electives/spec_decode/ngram.py", "", "v1/spec_decode/ngram_proposer.py"),
        ("electives/spec_decode/verify.py", "", "v1/sample/rejection_sampler.py"),
        ("electives/spec_decode/scheduler.py", "", "v1/core/sched/scheduler.py"),
        ("electives/spec_decode/speculation.py", "", ""),
        ("electives/spec_decode/verify_runner.py", "", "v1/worker/gpu_model_runner.py"),
        ("electives/spec_decode/kernels/verify_attention.py", "", "v1/attention/ops/triton_unified_attention.py"),
        ("electives/spec_decode/attention.py", "", ""),
        ("electives/spec_decode/choose.py", "", ""),
        ("electives/spec_decode/policy.py", "", ""),
        ("electives/spec_decode/measure.py", "", ""),
        ("electives/spec_decode/automaton.py", "", ""),
        ("electives/spec_decode/suffix.py", "", "v1/spec_decode/suffix_decoding.py"),
        ("electives/spec_decode/draft_model.py", "", "v1/spec_decode/draft_model.py"),
        ("electives/spec_decode/chain.py", "", ""),
        ("models/draft_head.py", "", ""),
        ("electives/spec_decode/heads.py", "", "v1/spec_decode/eagle.py"),
        ("electives/spec_decode/pairing.py", "", "v1/spec_decode/eagle.py"),
        ("electives/spec_decode/head_runner.py", "", "v1/spec_decode/eagle.py"),
        ("electives/spec_decode/chain_proposer.py", "", ""),
        ("electives/spec_decode/eagle3.py", "", "model_executor/models/llama_eagle3.py"),
    ],
    "x4": [
        ("electives/moe/models.py", "", "model_executor/models/qwen3_moe.py"),
        ("electives/moe/layers.py", "", "model_executor/layers/fused_moe/layer.py"),
        ("electives/moe/experts.py", "", ""),
        ("kernels/grouped_tiles.py", "", ""),
        ("electives/moe/kernels/grouped_linear.py", "", "model_executor/layers/fused_moe/fused_moe.py"),
        ("electives/moe/kernels/route.py", "", "model_executor/layers/fused_moe/moe_align_block_size.py"),
        ("electives/moe/kernels/moe_gemv.py", "", ""),
        ("electives/hopper/grouped.py", "", ""),
        ("electives/moe/fused.py", "", "model_executor/layers/fused_moe/fused_moe.py"),
        ("electives/moe/expert_load.py", "", ""),
    ],
    "x5": [
        ("electives/hybrid/models.py", "", "model_executor/models/qwen3_next.py"),
        ("electives/hybrid/state_layer.py", "", "model_executor/layers/mamba/abstract.py"),
        ("electives/hybrid/gated_delta_net.py", "", "model_executor/models/qwen3_next.py"),
        ("electives/hybrid/delta_rule.py", "", ""),
        ("electives/hybrid/short_conv.py", "", ""),
        ("electives/hybrid/snapshots.py", "", "v1/core/single_type_kv_cache_manager.py"),
        ("electives/hybrid/fused.py", "", ""),
        ("electives/hybrid/kernels/short_conv.py", "", "model_executor/layers/mamba/ops/causal_conv1d.py"),
        ("electives/hybrid/kernels/gated_norm.py", "", "model_executor/layers/fla/ops/layernorm_guard.py"),
        ("electives/hybrid/kernels/delta_rule.py", "", "model_executor/layers/fla/ops/fused_recurrent.py"),
    ],
    "x6": [
        ("electives/rollouts/tiles.py", "", "model_executor/layers/batch_invariant.py"),
        ("electives/rollouts/layers.py", "", ""),
        ("electives/rollouts/attention.py", "", ""),
        ("electives/rollouts/kernel_layers.py", "", ""),
        ("electives/rollouts/kernels/linear.py", "", "model_executor/layers/batch_invariant.py"),
        ("electives/rollouts/kernels/attention.py", "", ""),
        ("electives/rollouts/extension.py", "", ""),
        ("electives/rollouts/trainer.py", "", ""),
        ("electives/rollouts/generation.py", "", ""),
        ("electives/rollouts/weights.py", "", "model_executor/model_loader/reload/layerwise.py"),
        ("electives/rollouts/transfer.py", "", "distributed/weight_transfer/base.py"),
        ("electives/rollouts/sleep.py", "", "device_allocator/cumem.py"),
        ("electives/rollouts/routes.py", "", "entrypoints/serve/sleep/api_router.py"),
        ("electives/rollouts/grpo.py", "", ""),
        ("electives/rollouts/demo.py", "", ""),
    ],
    "x7": [
        ("cache/connector.py", "", "distributed/kv_transfer/kv_connector/v1/base.py"),
        ("engine/connected_scheduler.py", "", "v1/core/sched/scheduler.py"),
        ("electives/kv_transfer/plan.py", "", ""),
        ("electives/kv_transfer/digest.py", "", "v1/kv_offload/file_mapper.py"),
        ("electives/kv_transfer/offload.py", "", "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"),
        ("electives/kv_transfer/store.py", "", "v1/kv_offload/cpu/gpu_worker.py"),
        ("electives/kv_transfer/rank_cache.py", "", ""),
        ("electives/kv_transfer/kernels/pieces.py", "", "v1/kv_offload/cpu/swap_blocks_triton.py"),
        ("electives/kv_transfer/disk.py", "", "v1/kv_offload/tiering/fs/io.py"),
        ("electives/kv_transfer/wire.py", "", "distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"),
        ("electives/kv_transfer/segment.py", "", ""),
        ("electives/kv_transfer/blocks.py", "", ""),
        ("electives/kv_transfer/peers.py", "", ""),
        ("electives/kv_transfer/router.py", "", ""),
    ],
}

INTRO = """# Reading order

The source from the outside in, in the order in which the milestones, and then the electives (X1 to X7, optional chapters after M6), add it. Minutes are lines over {rate}, which is slow reading with the
chapter beside it; {files} files, about {hours:.0f} hours in all. The exercises are the functions of that file that you may write yourself:
read their docstrings, and leave the bodies until you have tried.

The last two columns name the file that does the same (or most of it) in [nano-vLLM](https://github.com/GeeeekExplorer/nano-vllm), under
`nanovllm/`, and in [vLLM](https://github.com/vllm-project/vllm)'s v1 engine, under `vllm/`. Each path was looked up in those repositories. vLLM
moves its files now and then: search for the class when one is gone. A dash means that we know of no counterpart.

Letters in shapes, as in `# [T, Hq, D]`, are in the [glossary](reference/glossary.md#letters-in-shapes). A comment "M6:" or "X3:" says what a field is for: earlier milestones
leave it as it is.

What is not listed are helpers, which a first reading may take at their names and first sentences: calls of `LLM` and of the engine that `generate` does not need, but for `get_default_sampling_params`
(`engine/llm_calls.py`, `engine/calls.py`), Ctrl-C and the progress bar (`engine/ctrl_c.py`, `engine/progress.py`), log-probabilities (`engine/logprobs.py`, `step/scores.py`), the table of electives (`plugins.py`) and their
hook (`engine/extension.py`), CPU threads, metrics and snapshots of the engine (`engine/`), the command line and the benchmarks (`apps/cli/`, `apps/bench/`), names and arguments of vLLM's
(`compat.py`, `engine/vllm_arguments.py`), the chat template and beam search (`engine/`), the flags of the server (`electives/server/config.py`, `electives/server/cli.py`),
the checks of a user's values (`engine/require.py`, `sample/sampling_rules.py`), prompts that are no plain text, or may be too long (`engine/prompt_forms.py`, `engine/long_prompts.py`), words that an answer must not hold (`engine/bad_words.py`),
the spelling of single tokens and answers without text (`engine/spelling.py`, `engine/no_text.py`), the choice of a backend (`attention/backends/registry.py`),
what fetches, checks and converts a model (`models/files.py`, `models/sources.py`, `models/checked_config.py`, `models/quick_start.py`, `electives/quantization/gguf_file.py`), small helpers
(`models/messages.py`, `models/written_files.py`, `distributed/children.py`), and the import finder of `mine/` (`learn/overlay.py`).
"""

NOTES = {  # below a milestone's heading
    "m1": """Take two evenings. The first one ends after `sample/noise.py`, with all that runs Hugging Face's model. The second one has our own layers and the loader.
Of `engine/setup.py` the class `EngineSetup` is enough at first, and `engine/events.py` is M1's as far as `Snapshot`. `SchedulerLike`, which the core works with, is the
protocol at the top of `engine/scheduler.py`; the rest of that file is M2's.
""",
}


def minutes(file: str) -> int:
    return max(1, round(len((ROOT / "folovllm" / file).read_text("utf-8").splitlines()) / LINES_A_MINUTE))


def exercises(manifest: list[dict[str, object]], file: str) -> str:
    module = "folovllm." + file.removesuffix(".py").replace("/", ".") + ":"
    found = [m["id"] for m in manifest if any(str(s).startswith(module) for s in m["symbols"])]  # type: ignore[attr-defined]
    return ", ".join(map(str, found))


def page() -> str:
    files = [file for rows in ORDER.values() for file, _, _ in rows]
    parts = [INTRO.format(rate=LINES_A_MINUTE, files=len(files), hours=sum(map(minutes, files)) / 60)]
    manifests = [tomllib.loads(f.read_text("utf-8")) for f in sorted((ROOT / "milestones").glob("*/milestone.toml"))]
    every = [exercise for manifest in manifests for exercise in manifest["exercise"]]
    for manifest in manifests:
        chapter = Path(manifest["chapter"]).name
        parts.append(f"## {manifest['id'].upper()}: [{manifest['title']}]({chapter})\n")
        parts += [NOTES[manifest["id"]]] if manifest["id"] in NOTES else []
        parts.append(f"<!-- files {manifest['id']} -->\n")  # what the Chinese edition copies
        parts.append("| file | minutes | exercises | nano-vLLM | vLLM |\n|---|---|---|---|---|")
        for file, nano, vllm in ORDER[manifest["id"]]:
            theirs = " | ".join(f"`{name}`" if name else "-" for name in (nano, vllm))
            parts.append(f"| `{file}` | {minutes(file)} | {exercises(every, file)} | {theirs} |")
        parts.append("\n<!-- end of files -->\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "reading_order.md").write_text(page(), "utf-8")
