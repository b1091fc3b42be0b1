"""Direct Alignment: Goel et al. 2024; see README.md."""
