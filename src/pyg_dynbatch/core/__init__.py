"""The algorithm: structures and programs become schedules, and an engine runs them on rows."""
