"""A fast decoder pass for T5, mT5 and UMT5."""
