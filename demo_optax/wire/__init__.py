"""Messages as bytes: what the workers selected, packed and unpacked."""
