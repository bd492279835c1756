"""Writes and reads bundles: folders with finished files and a manifest that lists them."""
