"""Encodes values and indices as words, and decodes them."""
