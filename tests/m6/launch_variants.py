"""Serve with every kernel launch noted and none done: which variants Triton would compile, and when, with no GPU.

The engine takes the paths of a GPU, over the memory of the CPU; a launch only leaves the key under which Triton would
look for compiled code. A program of its own, because Triton decides when it is first imported whether it interprets:
    python -m tests.m6.launch_variants tests.m6.traffic m6 "three rows"
takes the engines of a module, all or those that are named, and
prints a JSON object: for each engine, how many variants the start met, those of them that its dry run did not meet, and
those that only serving met.
"""

import json
import os
import sys
from importlib import import_module

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import folovllm.attention.backends.triton as triton_backend
from folovllm.config import EngineConfig
from folovllm.electives.quantization.calibrate import calibrate
from folovllm.engine.llm_engine import make_engine
from folovllm.kernels import pdl
from folovllm.kernels.filter_logits import FilterWorkspace
from folovllm.layers.attention import attention_layers
from folovllm.step.kv_format import UNSCALED
from folovllm.worker import graph_runner
from folovllm.worker.buckets import decode_bucket, prompt_buckets
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from tests.m6.traffic import FIELDS, serve_everything

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
seen: dict[str, None] = {}


def note(self, *args, grid, warmup, **kwargs):
    """In place of a launch: the kernel's name, how its arguments are specialized, and its options."""
    if not hasattr(self, "binder"):
        self.binder = create_function_from_signature(self.signature, self.params, BACKEND)
    _, specialization, options = self.binder(*args, **kwargs)
    seen.setdefault(f"{self.__name__} {specialization} {sorted(options.items())}")


def pretend_gpu() -> None:
    """CPU tensors say that they are on a GPU; what a kernel would have written is zero."""
    JITFunction.run = note
    torch.Tensor.is_cuda = property(lambda _: True)
    empty = torch.empty
    torch.empty = lambda *sizes, **kw: (empty if f"{kw.get('device')}" == "meta" else torch.zeros)(*sizes, **kw)
    torch.empty_like, torch.Tensor.new_empty = torch.zeros_like, torch.Tensor.new_zeros
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    graph_runner.buckets_for = lambda setup, more: (
        prompt_buckets(setup.max_num_seqs, setup.max_num_batched_tokens) + more
    )
    triton_backend.interpreted = pdl.available = lambda *_: True


def measure(overrides: dict) -> dict:
    """Start as on a GPU, then serve."""
    config = EngineConfig(**{**FIELDS, "device": "cpu", "dtype": "float32"} | overrides)
    engine = make_engine(config)
    runner = engine.executor._worker.runner
    seen.clear()
    if isinstance(runner, GraphRunner):
        dry_run = start(runner, captures=not config.enforce_eager)
    else:
        with torch.inference_mode():
            runner.compile_kernels()
        dry_run = dict(seen)
    at_start = list(seen)
    steps = serve_everything(engine)
    engine.close()
    not_in_dry_run = [variant for variant in at_start if variant not in dry_run]
    return {
        "at start": len(at_start), "steps": steps, "later": list(seen)[len(at_start) :], "not in the dry run": not_in_dry_run
    }  # fmt: skip


def start(runner: GraphRunner, captures: bool) -> dict[str, None]:
    """What follows the loading of the weights; returns what its dry run met."""
    inner, num_blocks = runner.inner, runner.inner.kv_cache.shape[2]
    runner._step_sampler._use_kernel = True
    runner._row_sampler._work = FilterWorkspace.allocate(21, runner._setup.vocab_size, torch.device("cpu"))
    others, runner._others = runner._others, {False: [], True: []}  # kernels are compiled before any is captured
    forget_kv_scales(inner)
    runner.compile_at_once(captures)
    dry_run = dict(seen)
    seen.clear()
    forget_kv_scales(inner)
    if inner._setup.config.calculate_kv_scales:
        calibrate(inner)
    inner.warmup_model()
    inner.allocate_kv_cache(num_blocks)
    with torch.inference_mode():
        runner.compile_kernels()
        for bucket in [*others[False], *map(decode_bucket, runner.buckets), *others[True]]:
            runner._capture(bucket)
    runner._others = others
    return dry_run


def forget_kv_scales(runner: ModelRunner) -> None:
    """What the start has found out so far."""
    for attention in attention_layers(runner.model):
        attention.scales = UNSCALED
    runner.bind_backends()


if __name__ == "__main__":
    pretend_gpu()
    torch.set_num_threads(1)
    engines = import_module(sys.argv[1]).ENGINES
    print(json.dumps({name: measure(engines[name]) for name in sys.argv[2:] or engines}))
