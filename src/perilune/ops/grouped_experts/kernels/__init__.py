"""What the experts run on a Hopper GPU."""
