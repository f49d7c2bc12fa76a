"""Suites, records and side-by-side tables: what a claim about speed is worth."""
