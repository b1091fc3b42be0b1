"""Drafts of a stream of requests that drifts; see README.md."""
