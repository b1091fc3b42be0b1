"""Faster Cascades: Narasimhan et al. 2024; see README.md."""
