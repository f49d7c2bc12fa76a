"""Training scripts for the demo and the benchmarks: one task, several ways to train it."""
