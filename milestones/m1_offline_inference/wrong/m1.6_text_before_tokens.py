"""Looks for stop strings before it looks at the token: the end of text is then explained by a string, and the text is cut there."""


def check_stop_conditions(seq):
    params, token = seq.params, int(seq.token_ids[-1])
    if seq.num_output_tokens < params.min_tokens:
        if params.stop:
            seq.detokenizer.skip_search()
    elif params.stop and (found := seq.detokenizer.find_stop(params.stop, params.include_stop_str_in_output)):
        seq.stop_reason = found
        return SequenceStatus.FINISHED_STOPPED
    elif token in seq.eos_token_ids and not params.ignore_eos:
        return SequenceStatus.FINISHED_STOPPED
    elif token in params.stop_token_ids:
        seq.stop_reason = token
        return SequenceStatus.FINISHED_STOPPED
    return SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= seq.max_tokens else None
