"""Values and indices as bytes, and back."""
