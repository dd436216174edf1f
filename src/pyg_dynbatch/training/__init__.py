"""Lightning modules, data modules and callbacks, where data and models meet."""
