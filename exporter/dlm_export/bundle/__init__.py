"""The bundle on disk: finished files in, a folder with a manifest that lists them out."""
