"""Which schedule to take: candidates judged by the simulator, refined, and found by measuring."""
