"""What attention residuals run on a GPU."""
