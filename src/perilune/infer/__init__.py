"""Running models: sampling and generation."""
