"""Drafts after their target was fine-tuned; see README.md."""
