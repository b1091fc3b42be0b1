"""PARD: An et al. 2025, arXiv 2504.18583."""
