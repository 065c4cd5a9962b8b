"""The public contracts: one module per thing a plugin implements or is handed."""
