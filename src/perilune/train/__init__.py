"""Training: stages, the loop, evaluation, what a run leaves behind."""
