"""A request and what comes of it: the open bundle and its sessions, requests, their constraints, results, schedulers, infilling."""
