"""What bounds a training, and what this loader brings to it."""
