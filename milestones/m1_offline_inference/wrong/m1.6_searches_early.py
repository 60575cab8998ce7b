"""Before min_tokens it does not tell the detokenizer, so that an early stop string is found later and cuts the text."""

from folovllm.request import SequenceStatus


def check_stop_conditions(seq):
    params, token = seq.params, int(seq.token_ids[-1])
    if seq.num_output_tokens >= params.min_tokens:
        if token in seq.eos_token_ids and not params.ignore_eos:
            return SequenceStatus.FINISHED_STOPPED
        if token in params.stop_token_ids:
            seq.stop_reason = token
            return SequenceStatus.FINISHED_STOPPED
        if params.stop and (found := seq.detokenizer.find_stop(params.stop, params.include_stop_str_in_output)):
            seq.stop_reason = found
            return SequenceStatus.FINISHED_STOPPED
    return SequenceStatus.FINISHED_LENGTH if seq.num_output_tokens >= seq.max_tokens else None
