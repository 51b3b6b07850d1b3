"""Bits, rounding and selection: arrays in, arrays out."""
