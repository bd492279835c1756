"""The bundle on disk: a folder of finished files and the manifest that lists them."""
