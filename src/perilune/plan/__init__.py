"""What a training run will need before it is run: memory, a layout over GPUs, time, energy."""
