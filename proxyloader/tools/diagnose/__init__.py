"""What bounds a training, and what proxyloader gains there."""
