"""X6: rollouts for reinforcement learning: weights in place, sleep, the trainer's own numbers, and a demo with GRPO."""
