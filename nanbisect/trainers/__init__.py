"""What executes the training steps of a cell."""
