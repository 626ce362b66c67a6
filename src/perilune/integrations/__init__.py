"""Adapters for other people's models.  Nothing here is imported by the rest; each file needs the library it names."""
