"""Writes and reads bundles. A bundle is a folder with a manifest, which lists the other files."""
