"""Predicts, reads, checks and draws what an exchange does."""
