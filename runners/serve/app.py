"""The HTTP server of a `Service`, in a thread of its own."""

from __future__ import annotations

from types import TracebackType

from runners.serve.service import Service


class Server:
    """Serves while its `with` block runs; `service.run` does the work."""

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0: any free one."""
        self.url = ""  # such as http://127.0.0.1:8000, with the paths of the wire behind it

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
