"""Any JSON documents: files, data module, Lightning task, predictions and their explanation."""
