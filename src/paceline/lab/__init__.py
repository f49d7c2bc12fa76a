"""Clusters of unlike machines, emulated on one."""
