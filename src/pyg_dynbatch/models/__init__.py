"""Whole networks as plain modules: encode, run the schedule, predict."""
