"""Writes and reads bundles. A bundle is a folder with a manifest, which lists all other files."""
