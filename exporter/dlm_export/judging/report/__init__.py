"""Writes HTML pages: the report of one bundle, and a page that compares several bundles."""
