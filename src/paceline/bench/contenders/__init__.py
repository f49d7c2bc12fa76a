"""Ways to train a task, one file each: plain DDP, DDP tuned by hand, paceline, and other libraries through their own API."""
