"""Rounds each column for itself: no other column makes up for its error. That is rounding to nearest, with more work."""


def round_columns(w, factor, scale, zero, bits):
    codes = round_to_codes(w, scale, zero, bits)
    errors = (w - dequantize_groups(codes, scale.float(), zero)) / factor.diagonal()
    return codes, errors
