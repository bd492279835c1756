"""A request and what comes of it: the open bundle and its sessions, requests, results, schedulers, infilling."""
