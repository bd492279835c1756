"""Implements the HTTP server of ``dlm-export serve``, which follows the APIs of OpenAI and Mercury.

- ``app`` defines the routes.
- ``hosting`` opens and closes the bundles.
- ``fields`` checks the bodies of requests.
- ``field_arguments`` turns the bodies into requests for the runtime.
- ``replies`` and ``streams`` write the responses.

The server needs the optional dependencies of the extra ``serve``.
"""
