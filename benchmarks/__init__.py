"""Speed, as ratios measured side by side in one interleaved run. `make bench` runs all of it."""
