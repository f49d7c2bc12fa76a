"""Suites that ship; `paceline bench list` lists them."""
