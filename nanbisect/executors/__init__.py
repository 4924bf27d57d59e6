"""Where attempts run: one small protocol, one module a place."""
