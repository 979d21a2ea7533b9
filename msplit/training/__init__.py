"""Training: `Trainer`, its checkpoints, and the data that goes in."""
