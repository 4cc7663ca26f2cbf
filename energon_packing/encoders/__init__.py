"""Encoders: a conversation is measured without its pixels, and rendered with them once it is known to be needed."""
