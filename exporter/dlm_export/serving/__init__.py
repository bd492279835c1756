"""The HTTP server of ``dlm-export serve``: OpenAI's API, with the additions of Mercury's.

``app`` has the routes. ``hosting`` holds the open bundles. ``fields`` checks the bodies of requests,
``conversation`` and ``completing`` turn them into requests of the runtime, and ``replies`` and
``streams`` write the answers. Needs the extra ``serve``.
"""
