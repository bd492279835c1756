"""The bundle on disk: a folder of finished files, and a manifest that lists them."""
