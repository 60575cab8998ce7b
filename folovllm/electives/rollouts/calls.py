"""What the core calls of this package, by name (`folovllm.plugins.ROLLOUTS`)."""

from folovllm.electives.rollouts.sleep import sleep, wake_up
from folovllm.electives.rollouts.weights import get_weights, update_weights

__all__ = ["get_weights", "sleep", "update_weights", "wake_up"]
