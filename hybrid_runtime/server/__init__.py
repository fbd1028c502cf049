"""An HTTP server in OpenAI's form around one engine: `hybrid-runtime serve` (docs/server.md).

Needs the extra `server`: `pip install 'hybrid-runtime[server]'`.
"""
