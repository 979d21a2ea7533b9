"""Search for schedules, the engine's part: kernel modes, and schedules that are measured."""
