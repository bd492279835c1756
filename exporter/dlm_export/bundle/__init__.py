"""Writes and reads bundles. A bundle is a folder with a manifest. The manifest lists all other
files.
"""
