"""X3: speculative decoding. A proposer drafts the next tokens; the model verifies several of them in one step."""
