"""Helpers without a subject of their own: files, text, names, checks."""
