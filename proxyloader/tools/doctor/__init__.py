"""``proxyloader doctor``: what of this machine and of the installed packages keeps the loader from its work."""
