"""The same model composed from flash-linear-attention's layers and stock parts of PyTorch, to be timed beside ours."""
