"""A read-only stand-in for the hub on the loopback interface: model info, file trees, ranged requests, refusals."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


class HubServer:
    """Serves the folders given by repository name; `sent` counts the bytes of each file that were delivered."""

    def __init__(self, repos: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.sent: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def answer(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def refuse(self, code: int, kind: str) -> None:
                self.answer(code, b"{}", {"X-Error-Code": kind, "X-Error-Message": kind})

            def do_GET(self) -> None:
                path = unquote(self.path.split("?")[0])
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?", path)
                file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                name = (api or file)[1] if api or file else ""
                revision = (api or file)[2] if api or file else None
                if name in gated:
                    self.refuse(403, "GatedRepo")
                elif name not in repos:
                    self.refuse(404, "RepoNotFound")
                elif revision not in (None, "main", COMMIT):
                    self.refuse(404, "RevisionNotFound")
                elif api:
                    self.info(name, repos[name], tree="/tree/" in path)
                else:
                    self.file(repos[name] / file[3])

            do_HEAD = do_GET

            def info(self, name: str, folder: Path, tree: bool) -> None:
                sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
                siblings = [{"rfilename": file, "size": size, "blobId": "0"} for file, size in sizes.items()]
                info = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
                info |= {"tags": [], "downloads": 0, "likes": 0}
                entries = [{"type": "file", "path": file, "size": size, "oid": "0"} for file, size in sizes.items()]
                body = json.dumps(entries if tree else info).encode()
                self.answer(200, body, {"Content-Type": "application/json"})

            def file(self, path: Path) -> None:
                if not path.is_file():
                    self.refuse(404, "EntryNotFound")
                    return
                size = path.stat().st_size
                etag = hashlib.sha1(f"{path.name}{size}".encode()).hexdigest()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
                wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                first = int(wanted[1]) if wanted else 0
                last = min(int(wanted[2] or size - 1) if wanted else size - 1, size - 1)
                with path.open("rb") as data:
                    data.seek(first)
                    body = data.read(last - first + 1) if self.command == "GET" else b""
                hub.sent[path.name] = hub.sent.get(path.name, 0) + len(body)
                headers["Content-Length"] = str(last - first + 1)
                if wanted:
                    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
                self.answer(206 if wanted else 200, body, headers)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()
