"""Photographs made from numbers, to try things with."""
