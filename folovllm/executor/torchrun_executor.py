"""The executor of a rank that torchrun started, on one machine or on several."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from folovllm.distributed.group import ProcessGroup
from folovllm.engine.require import require
from folovllm.engine.setup import EngineSetup
from folovllm.executor.packed_executor import LocalExecutor
from folovllm.executor.rank import MakeRank, rank_setup


class TorchrunExecutor(LocalExecutor):
    """Runs a worker in this process. Its peers run the same program.

    Under torchrun every rank has an engine of its own. Scheduling depends on neither time nor chance, so with the same
    requests all engines schedule the same steps and sample the same tokens. Only the layers exchange data. A program prints
    on rank 0, and does everything else on all ranks.
    """

    def __init__(self, setup: EngineSetup, make_rank: MakeRank) -> None:
        """Wait for the other ranks, and load this rank's part. Raises ValueError if torchrun started another number of ranks."""
        size, started = setup.config.tensor_parallel_size, int(os.environ["WORLD_SIZE"])
        says = f"torchrun started {started} ranks: tensor_parallel_size must be {started} too, not {size}"
        require(size == started, says)
        says = "under torchrun a process has one engine with tensor_parallel_size > 1: close the first one"
        require(not dist.is_initialized(), says)
        own = rank_setup(setup, int(os.environ["LOCAL_RANK"]))
        self._group = ProcessGroup(int(os.environ["RANK"]), size, own.device)
        worker, runner = make_rank(own, self._group)
        super().__init__(setup.max_num_seqs, worker, runner)
        blocks = torch.tensor([worker.num_kv_blocks], device=own.device)
        self.num_kv_blocks = int(self._group.all_gather(blocks).min())

    def shutdown(self) -> None:
        """Drop the part of the model, then leave the group. All ranks must call it. A second call does nothing."""
        if hasattr(self, "_worker"):
            super().shutdown()  # graphs first, because they use the group
            self._group.close()
