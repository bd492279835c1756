"""The HTML pages: report.html of one bundle, and the page that compares several bundles."""
