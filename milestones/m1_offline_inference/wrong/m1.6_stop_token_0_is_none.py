"""Asks whether the stop_reason is true, which token 0 is not: an answer with 0 in stop_token_ids goes on."""


def check_stop_conditions(seq):
    params = seq.params
    full = SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= seq.max_tokens else None
    if seq.num_output_tokens < params.min_tokens:
        if params.stop:
            seq.detokenizer.skip_search()
        return full
    if not params.ignore_eos and seq.last_token in seq.eos_token_ids:
        return SequenceStatus.FINISHED_STOPPED
    reason = seq.last_token if seq.last_token in params.stop_token_ids else None
    if not reason and params.stop:
        reason = seq.detokenizer.find_stop(params.stop, params.include_stop_str_in_output)
    if not reason:
        return full
    seq.stop_reason = reason
    return SequenceStatus.FINISHED_STOPPED
