"""Serve with two ranks, as a user's script does: nothing stands under `if __name__ == "__main__"`, and nothing is closed.

`python -m tests.m6.two_ranks MODEL DO` names the processes of its ranks, and answers one request (`once`) or does not end
(`forever`). `write FOLDER` is for torchrun: each rank writes its answers into a file.
"""

import json
import os
import sys
from pathlib import Path

from folovllm import LLM, SamplingParams

MODEL, DO, *FOLDER = sys.argv[1:]
FIELDS = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "use_tqdm": False, "tensor_parallel_size": 2}

if DO == "write":
    with LLM(MODEL, **FIELDS) as llm:
        how = [SamplingParams(max_tokens=12, seed=5, ignore_eos=True), SamplingParams(max_tokens=9, seed=6, top_p=0.8)]
        answers = llm.generate([[1, 2, 3], [9] * 20], how, use_tqdm=False)
        Path(*FOLDER, os.environ["RANK"]).write_text(json.dumps([answer.outputs[0].token_ids for answer in answers]))
else:
    llm = LLM(MODEL, **FIELDS)
    print(*llm.engine.executor.pids, flush=True)
    while DO == "forever":
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
