"""Cluster files that ship with the package."""
