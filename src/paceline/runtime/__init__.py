"""The thin torch shell: measure, observe, decide, apply."""
