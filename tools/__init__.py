"""Tools that environments give to a model."""
