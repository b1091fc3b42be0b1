"""The papers' tables and figures as staged plans, their result rows, and verdicts on claims."""
