"""The extension points: one table of rows, the registries behind it, loading and the ledger."""
