"""Trees and DAGs as PyG data: formats, data sets, collating, models, tasks."""
