"""DistillSpec: Zhou et al. 2023; see README.md."""
