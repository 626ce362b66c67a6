"""What everything else stands on: errors, configuration, logging, the choice of a backend.  No torch at import."""
