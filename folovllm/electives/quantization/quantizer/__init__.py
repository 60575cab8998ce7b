"""The quantizer, `folovllm quantize`: GPTQ, AWQ, and rounding to FP8 and INT8."""
