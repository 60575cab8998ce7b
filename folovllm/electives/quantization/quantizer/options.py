"""`QuantizeOptions`: how a model is quantized."""

from __future__ import annotations

from dataclasses import dataclass, fields

from folovllm.engine.require import require

FORMATS = ("gptq", "awq", "fp8", "int8")
CALIBRATED = ("gptq", "awq")  # these look at inputs
ONLY: dict[str, tuple[str, ...]] = {  # what belongs to some formats alone
    "group_size": CALIBRATED, "no_clip": ("awq",),
    **dict.fromkeys(("asymmetric", "act_order", "nearest", "damping"), ("gptq",)),
}  # fmt: skip


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
        require(self.format in FORMATS, f"unknown format {self.format!r}: choose one of {', '.join(FORMATS)}")
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for name in given & ONLY.keys():
            flag, formats = f"--{name.replace('_', '-')}", " or ".join(ONLY[name])
            require(self.format in ONLY[name], f"{flag} belongs to --format {formats}, not to {self.format}")
            idle = self.nearest and name in ("act_order", "damping")
            require(not idle, f"--nearest rounds all columns alike: leave out {flag}")
        require(self.group_size in (32, 64, 128), f"group_size must be 32, 64 or 128, not {self.group_size}")
        require(0 < self.damping <= 1, f"damping must be above 0 and at most 1, not {self.damping}")
        require(self.samples >= 1 and self.length >= 2, "samples must be at least 1, and length at least 2")

    @property
    def is_calibrated(self) -> bool:
        """Whether the codes depend on a calibration text."""
        return self.format in CALIBRATED and not self.nearest
