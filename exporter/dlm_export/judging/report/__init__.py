"""HTML pages: report.html of one bundle, and a page that compares several bundles."""
