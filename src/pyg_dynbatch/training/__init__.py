"""Training with Lightning: the base of all tasks and data modules, callbacks, command line."""
