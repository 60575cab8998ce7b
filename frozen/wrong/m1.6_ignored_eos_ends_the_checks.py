"""An end-of-text id that is ignored ends the checks: neither its place in stop_token_ids nor the length counts. Input: ignore_eos, the last of max_tokens is eos."""

def check_stop_conditions(seq):
    params, token = seq.params, seq.last_token
    if seq.num_output_tokens >= params.min_tokens:
        if token in seq.eos_token_ids:
            return None if params.ignore_eos else SequenceStatus.FINISHED_STOPPED
        if token in params.stop_token_ids:
            seq.stop_reason = token
            return SequenceStatus.FINISHED_STOPPED
        if params.stop:
            found = seq.detokenizer.find_stop(params.stop, params.include_stop_str_in_output)
            if found is not None:
                seq.stop_reason = found
                return SequenceStatus.FINISHED_STOPPED
    elif params.stop:
        seq.detokenizer.skip_search()
    return SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= seq.max_tokens else None
