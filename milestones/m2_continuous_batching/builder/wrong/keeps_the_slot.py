"""Who ends leaves `running` and keeps its slot: after as many answers as there are slots nobody comes in any more."""

from __future__ import annotations

from collections.abc import Iterable

from folovllm.learn.builders.reference import Scheduler as Right
from folovllm.engine.stop import check_stop_conditions
from folovllm.request import Sequence, SequenceOutput


class Scheduler(Right):
    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        outputs = []
        for seq, token_ids in sampled:
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                outputs.append(SequenceOutput(seq, [token_id], status))
        return outputs
