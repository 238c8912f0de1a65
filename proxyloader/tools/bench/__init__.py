"""``proxyloader bench``: how fast is the loader here, beside what else could load the same images?"""
