"""Draws charts as SVG, and formats numbers and texts for pages and charts."""
