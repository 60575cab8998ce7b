"""Mini: an inference engine that a learner writes from an empty folder, and the harness that plays, checks and films it."""
