"""Train the embedded model: text from a story grammar, a tokenizer of its own, a Qwen3 of 5.8 million parameters.

Nothing here is imported by `folovllm`; the result lies in `folovllm/assets/stories-5m`. See README.md beside this file.
"""
