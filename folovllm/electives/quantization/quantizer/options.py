"""`QuantizeOptions`: how a model is quantized."""

from __future__ import annotations

from dataclasses import dataclass, fields

FORMATS = ("gptq", "awq", "fp8", "int8")
CALIBRATED = ("gptq", "awq")  # these look at inputs
ONLY: dict[str, tuple[str, ...]] = {  # what belongs to some formats alone
    "group_size": CALIBRATED,
    **dict.fromkeys(("asymmetric", "act_order", "nearest", "damping"), ("gptq",)),
    "no_clip": ("awq",),
}


@dataclass(slots=True, kw_only=True, frozen=True)
class QuantizeOptions:
    """How a model is quantized; each field is a flag of `folovllm quantize`.

    Attributes:
        format: gptq, awq, fp8 or int8.
        group_size: how many neighbouring weights share a scale (gptq, awq): 32, 64 or 128.
        asymmetric: give each group a zero of its own (gptq). Often better, but vLLM's fastest kernel wants none; awq always
            has them.
        act_order: round the columns with the largest inputs first (gptq). Often better; the engine then refuses to split
            the model over several GPUs.
        nearest: round to the nearest code, without GPTQ's corrections (gptq); to compare.
        damping: what is added to the diagonal of its matrix, as a share of its mean (gptq).
        no_clip: leave out the search for clipped groups (awq).
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
    samples: int = 128
    length: int = 512

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}: choose one of {', '.join(FORMATS)}")
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for name in given & ONLY.keys():
            if self.format not in (formats := ONLY[name]):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} belongs to --format {' or '.join(formats)}, not to {self.format}")
        if self.nearest and (idle := given & {"act_order", "damping"}):
            raise ValueError(f"--nearest rounds all columns alike: leave out --{min(idle).replace('_', '-')}")
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
