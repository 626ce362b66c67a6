"""What the short convolution runs on a GPU."""
