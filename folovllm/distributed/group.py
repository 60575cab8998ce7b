"""The ranks that share a model, and their two collectives: all-reduce and all-gather."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from folovllm.distributed.one_shot_buffers import OneShotBuffers

logger = logging.getLogger("folovllm")

# torch 2.13 renamed this function, and warns about the old name.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that dies ends the others much earlier
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}  # over NVLink


class PeersLost(ConnectionError):
    """A collective failed, most likely because another rank ended. The error of that rank is the cause."""


class ProcessGroup:
    """The ranks that share a model, over torch.distributed's default group: NCCL between GPUs, gloo between CPUs.

    A process can be in one such group only. Therefore each rank of each engine is a process of its own. All ranks make the same
    calls in the same order. With `one_shot_buffers` a kernel sums over the ranks itself, without `all_reduce`.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any = None) -> None:
        """Meet the other ranks at `store`, or where torchrun's environment says. Blocks until all are there."""
        self.rank, self.size = rank, size
        for name, value in NO_MULTICAST.items():
            os.environ.setdefault(name, value)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        self._one_shot = make_one_shot(device, size) if device.type == "cuda" else None
        self.one_shot_buffers = make_one_shot_buffers(rank, size, device) if self._one_shot is not None else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up all ranks' `x`, which may be overwritten; returns the sum. Small sums on GPUs use the one-shot kernel."""
        if self._one_shot is not None and self._one_shot.can_handle(x):
            return self._one_shot(x)
        return self._together(lambda: dist.all_reduce(x), x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Collect all ranks' `x` on every rank: [size, *x.shape]."""
        everyone = x.new_empty(self.size * x.numel())
        self._together(lambda: gather(everyone, x.contiguous().view(-1)), x)
        return everyone.view(self.size, *x.shape)

    def close(self) -> None:
        """Leave the group. Delete graphs that captured a collective before this call, or it never returns."""
        if self._one_shot is not None:
            torch.cuda.synchronize()  # peers may read our memory until our last sum is over
            self._one_shot = self.one_shot_buffers = None
        dist.destroy_process_group()

    def _together(self, collective: Callable[[], object], x: torch.Tensor) -> torch.Tensor:
        try:
            collective()
        except RuntimeError as error:
            raise PeersLost(f"rank {self.rank} lost its peers: {error}") from error
        return x


class OneShotAllReduce:
    """An all-reduce in a single kernel: each GPU reads the numbers of all others and sums them itself.

    It has twice the traffic of a ring and a fraction of its latency, so it is for the small tensors of a decode step. The
    kernel waits for all ranks at its beginning and at its end. Therefore one buffer serves all calls, in a graph too.
    """

    LARGEST = 2 << 20  # bytes; up to this size it was faster than NCCL (`tools/bench_tp.py`)

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        self._name = dist.group.WORLD.group_name
        self._buffer = symm_mem.empty(self.LARGEST, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._buffer, self._name)

    def can_handle(self, x: torch.Tensor) -> bool:
        """Return whether `x` is small enough, and a multiple of the 16 bytes that the kernel moves at a time."""
        size = x.numel() * x.itemsize
        return size <= self.LARGEST and size % 16 == 0 and x.dtype in (torch.bfloat16, torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks in a new tensor."""
        shared = self._buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)


def make_one_shot(device: torch.device, size: int) -> OneShotAllReduce | None:
    """Return the one-shot all-reduce, or None where it does not work.

    It works if the GPUs see each other's memory and a trial sum is right on all ranks. `FOLOVLLM_ONE_SHOT=0` disables it,
    for comparison.
    """
    if os.environ.get("FOLOVLLM_ONE_SHOT") == "0" or not all_say(_sees_all(device, size), device):
        return None
    is_right, one_shot = False, None
    try:
        one_shot = OneShotAllReduce(device)
        is_right = _sums_right(one_shot, size)
    except (RuntimeError, ImportError, AttributeError) as error:
        logger.warning("one-shot all-reduce is not available (%s): NCCL computes the sums", error)
    return one_shot if all_say(is_right, device) else None


def make_one_shot_buffers(rank: int, size: int, device: torch.device) -> OneShotBuffers | None:
    """Return the one-shot buffers, or None unless a trial write arrives in the memory of all GPUs.

    All ranks call this together. `FOLOVLLM_ONE_SHOT_BUFFERS=0` disables the buffers, for comparison.
    """
    if os.environ.get("FOLOVLLM_ONE_SHOT_BUFFERS") == "0":
        return None
    one_shot_buffers = None
    try:
        one_shot_buffers = OneShotBuffers.shared(rank, size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        logger.warning("linear kernels cannot sum over ranks (%s): a separate kernel does", error)
    if not all_say(one_shot_buffers is not None, device):
        return None
    assert one_shot_buffers is not None
    one_shot_buffers.write_trial()
    all_say(True, device)  # a barrier: all ranks have written
    return one_shot_buffers if all_say(one_shot_buffers.has_trials(), device) else None


def all_say(yes: bool, device: torch.device) -> bool:
    """Return whether `yes` is true on all ranks. If one of them cannot do something, none may begin it."""
    verdict = torch.tensor([float(yes)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def _sees_all(device: torch.device, size: int) -> bool:
    """Return whether all ranks are on this machine and `device` can read the memory of all their GPUs."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size or torch.cuda.device_count() < size:
        return False
    return all(torch.cuda.can_device_access_peer(device, other) for other in range(size) if other != device.index)


def _sums_right(one_shot: OneShotAllReduce, size: int) -> bool:
    """Return whether a captured graph of two sums, a large and a small one, is right when it is replayed on new numbers."""
    rank = dist.get_rank()
    large = torch.arange(one_shot.LARGEST // 4, device="cuda") % 1000.0
    x, small = large.clone(), large[:256].clone()
    one_shot(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        totals = one_shot(x), one_shot(small)
    right = True
    for number in (1, 5, 7):  # no early exit: the other ranks would wait for this one
        x.copy_(large + number + rank)
        small.copy_(x[:256])
        graph.replay()
        expected = size * (large + number) + size * (size - 1) // 2
        right &= torch.equal(totals[0], expected) and torch.equal(totals[1], expected[:256])
    return right


def child_environment() -> dict[str, str]:
    """Return the variables that torch and NCCL read when a rank starts. Multicast over NVLink stays off."""
    extra = dict(NO_MULTICAST)
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        extra["GLOO_SOCKET_IFNAME"] = loopback[0]
    return extra | dict(os.environ)
