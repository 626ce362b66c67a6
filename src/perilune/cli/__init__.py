"""The command line: parsing and wiring.  Nothing heavy is imported before a verb runs."""
