"""Counts up to what the request asked for, beyond what the context has room for."""

from folovllm.request import SequenceStatus


def check_stop_conditions(seq):
    params, token = seq.params, int(seq.token_ids[-1])
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
    return SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= params.max_tokens else None
