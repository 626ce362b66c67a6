"""Whole models, one folder each."""
