"""``proxyloader bench``: the speed of the loader on this machine, compared with other ways to load the same images."""
