"""What the search for schedules needs of the engine: kernel modes, and schedules that are measured."""
