"""When an answer is over."""

from __future__ import annotations

from folovllm.request import Sequence, SequenceStatus


def check_stop_conditions(seq: Sequence) -> SequenceStatus | None:
    """Whether the newest token ends the answer, and how; None to go on.

    Called once after each token. The rules, in this order:

    1. fewer than `min_tokens` generated: nothing but rule 5 applies, and no later check may find a stop string that
       began so early (`seq.detokenizer.skip_search()`);
    2. the token is one of the model's end-of-text ids (unless `ignore_eos`): FINISHED_STOPPED;
    3. the token is one of `stop_token_ids`: FINISHED_STOPPED, with the id as `seq.stop_reason`;
    4. a stop string occurs in the text (`seq.detokenizer.find_stop(stop, include)` returns it or None, and cuts the
       text there): FINISHED_STOPPED, with the string as `seq.stop_reason`;
    5. `seq.max_tokens` generated: FINISHED_LENGTH.

    Text is decoded only for requests that have stop strings: it costs time.
    """
    params, token = seq.params, seq.last_token
    if seq.num_output_tokens < params.min_tokens:
        if params.stop:
            seq.detokenizer.skip_search()
    elif token in seq.eos_token_ids and not params.ignore_eos:
        return SequenceStatus.FINISHED_STOPPED
    elif token in params.stop_token_ids:
        seq.stop_reason = token
        return SequenceStatus.FINISHED_STOPPED
    elif params.stop and (found := seq.detokenizer.find_stop(params.stop, params.include_stop_str_in_output)):
        seq.stop_reason = found
        return SequenceStatus.FINISHED_STOPPED
    return SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= seq.max_tokens else None
