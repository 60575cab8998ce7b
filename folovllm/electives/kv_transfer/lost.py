"""Which requests must be computed here, because the engine that was to compute their prompts will not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Transfer:
    """A prompt whose K/V a peer was asked for.

    Attributes:
        number: in the order of arrival.
        num_missing: blocks that have not come yet.
        deadline: when they must be here, on the clock of `time.monotonic`.
    """

    number: int
    peer: str
    num_missing: int
    deadline: float


def requests_to_recompute(transfers: Iterable[Transfer], lost_peers: Collection[str], now: float) -> list[int]:
    """The requests that must not wait any longer: their prompts are computed here, as far as no K/V came.

    A transfer is given up if blocks are missing and its peer is lost, or its deadline has come (`now` equals or is behind it). One
    whose blocks have all come is never computed again, whatever became of its peer.

    Returns:
        Their numbers, in the order of arrival: the first to come is the first to be computed.
    """
    return sorted(
        transfer.number
        for transfer in transfers
        if transfer.num_missing > 0 and (transfer.peer in lost_peers or now >= transfer.deadline)
    )
