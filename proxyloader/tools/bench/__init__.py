"""``proxyloader bench``: compare the throughput of this loader with other ways to load the same images."""
