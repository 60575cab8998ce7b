"""`QuantizeOptions`: how a model is quantised."""

from __future__ import annotations

from dataclasses import dataclass, fields

BLOCK = 128  # rows and columns that share a scale (fp8)
FORMATS = ("gptq", "awq", "fp8", "int8")
CALIBRATED = ("gptq", "awq")  # these look at inputs
ONLY = {  # what belongs to some formats alone
    "group_size": ("gptq", "awq"),
    "asymmetric": ("gptq",),
    "act_order": ("gptq",),
    "nearest": ("gptq",),
    "damping": ("gptq",),
    "no_clip": ("awq",),
    "per_channel": ("fp8",),
}


@dataclass(slots=True, kw_only=True, frozen=True)
class QuantizeOptions:
    """What decides the codes; each field is a flag of `folovllm quantize`.

    Attributes:
        format: gptq, awq, fp8 or int8.
        group_size: how many neighbouring weights share a scale (gptq, awq): 32, 64 or 128.
        asymmetric: give each group a zero of its own (gptq). Often better, but vLLM's fastest kernel wants none; awq always
            has them.
        act_order: round the columns with the largest inputs first (gptq). Often better; the engine then refuses to split
            the model over several GPUs.
        nearest: round to the nearest code, without GPTQ's corrections (gptq); to compare.
        damping: what GPTQ adds to the diagonal of its matrix, as a share of its mean.
        no_clip: leave out AWQ's search for clipped groups.
        per_channel: a scale for each output in place of one for each block of 128 x 128 (fp8).
        samples: most rows of text to calibrate with.
        length: tokens of a row.

    Raises:
        ValueError: a value is out of range, or belongs to another format.
    """

    format: str
    group_size: int = 128
    asymmetric: bool = False
    act_order: bool = False
    nearest: bool = False
    damping: float = 0.01
    no_clip: bool = False
    per_channel: bool = False
    samples: int = 128
    length: int = 512

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}: choose one of {', '.join(FORMATS)}")
        for field in fields(self):
            formats = ONLY.get(field.name, FORMATS)
            if self.format not in formats and getattr(self, field.name) != field.default:
                flag = field.name.replace("_", "-")
                raise ValueError(f"--{flag} belongs to --format {' or '.join(formats)}, not to {self.format}")
        if self.nearest and self.act_order:
            raise ValueError("--nearest rounds all columns alike: leave out --act-order")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size must be 32, 64 or 128, not {self.group_size}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, not {self.damping}")
        if self.samples < 1 or self.length < 2:
            raise ValueError("samples must be at least 1, and length at least 2")

    @property
    def is_calibrated(self) -> bool:
        """Whether the codes depend on a calibration text."""
        return self.format in CALIBRATED and not self.nearest
