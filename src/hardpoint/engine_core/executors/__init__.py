"""How the engine core runs its workers."""
