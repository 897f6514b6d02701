"""A stand-in for the Hugging Face Hub on the loopback interface: models, and names of datasets; standard library only.

Serves what huggingface_hub asks for when it creates repositories, commits files and downloads models. All files are
small, so nothing goes through LFS or Xet. Point `HF_ENDPOINT` at `hub.endpoint` before huggingface_hub is imported:

    with FakeHub(tokens={"hf_writer": "user"}) as hub: ...

Requests without a token may read public repositories. A token maps to the user it belongs to, and may write to that
user's repositories alone.
"""

import base64
import dataclasses as dc
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dc.dataclass
class Repo:
    """A model repository: branches, each a list of commits (id, title, files)."""

    private: bool
    branches: dict[str, list[tuple[str, str, dict[str, bytes]]]]

    def commit(self, revision):
        """The commit a branch name, pull request reference or commit id stands for, or None."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c[0] == revision), None)


class RefusedError(Exception):
    """An error response."""

    def __init__(self, status, code="", text="refused"):
        super().__init__(text)
        self.status, self.code = status, code


def _sha(content):
    return hashlib.sha1(content).hexdigest()


class FakeHub:
    """The server. `repos` maps `owner/name` to a `Repo`, `datasets` has names of datasets; `requests` lists method and
    path of all requests."""

    def __init__(self, tokens=None, *, fail_with=None):
        self.tokens = {} if tokens is None else tokens
        self.fail_with = fail_with
        self.repos: dict[str, Repo] = {}
        self.datasets: set[str] = set()
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and content are packets of their own

            def log_message(self, *args):
                pass

            def do_GET(self):
                hub.answer(self)

            do_POST = do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        often = 0.01  # looks for its end every so many seconds
        threading.Thread(target=self._server.serve_forever, args=(often,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo_id, revision="main"):
        """Path to content of a repository."""
        return self.repos[repo_id].commit(revision)[2]

    def answer(self, handler):
        """Serve one request."""
        status, headers, content = self.reply(handler)
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def reply(self, handler):
        """Status, headers and content of the answer to a request."""
        path, _, query = handler.path.partition("?")
        path = urllib.parse.unquote(path)
        body = _body(handler)
        self.requests.append(f"{handler.command} {path}")
        try:
            if self.fail_with is not None:
                raise RefusedError(self.fail_with)
            user = self._user(handler)
            status, headers, content = self._route(handler, path, urllib.parse.parse_qs(query), body, user)
        except RefusedError as refusal:
            status = refusal.status
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
            content = {"error": str(refusal)}
        if isinstance(content, dict | list):
            content = json.dumps(content).encode()
            headers = {"Content-Type": "application/json", **headers}
        return status, headers, content

    def _user(self, handler):
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in self.tokens:
            raise RefusedError(401, text="Invalid credentials in Authorization header")
        return self.tokens[token]

    def _route(self, handler, path, query, body, user):
        routes = {
            r"/api/whoami-v2": self._whoami,
            r"/api/validate-yaml": lambda request: (200, {}, {"errors": [], "warnings": []}),
            r"/api/repos/create": self._create,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>.+)": self._branch,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/discussions(?:/(?P<number>\d+))?": self._discussion,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)": self._preupload,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)": self._commit,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+).*": self._tree,
            r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?": self._info,
            r"/api/datasets/(?P<repo>[^/]+/[^/]+)": self._dataset,
            r"/(?P<repo>[^/]+/[^/]+)/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<file>.+)": self._resolve,
        }
        for pattern, serve in routes.items():
            if match := re.fullmatch(pattern, path):
                request = {"handler": handler, "query": query, "body": body, "user": user, **match.groupdict()}
                return serve(request)
        raise RefusedError(404, "RepoNotFound", f"no such path {path}")

    def _repo(self, request, *, write=False):
        repo = self.repos.get(request["repo"])
        owner = request["repo"].split("/")[0]
        if repo is None or (repo.private and request["user"] != owner):
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        if write and request["user"] != owner:
            raise RefusedError(403, text="You don't have the rights to write here")
        return repo

    def _at(self, request):
        repo = self._repo(request)
        commit = repo.commit(request["revision"] or "main")
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", "Invalid revision")
        return repo, commit

    def _whoami(self, request):
        if request["user"] is None:
            raise RefusedError(401)
        auth = {"accessToken": {"role": "write", "displayName": "test"}}
        return 200, {}, {"type": "user", "name": request["user"], "orgs": [], "auth": auth}

    def _create(self, request):
        data = json.loads(request["body"])
        repo_id = f"{data.get('organization') or request['user']}/{data['name']}"
        if request["user"] != repo_id.split("/")[0]:
            raise RefusedError(403)
        if repo_id in self.repos:
            raise RefusedError(409, text="You already created this model repo")
        private = bool(data.get("private")) or data.get("visibility") == "private"
        first = ("0" * 40, "initial commit", {".gitattributes": b""})
        self.repos[repo_id] = Repo(private, {"main": [first]})
        return 200, {}, {"url": f"{self.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}

    def _branch(self, request):
        repo = self._repo(request, write=True)
        if request["branch"] in repo.branches:
            raise RefusedError(409, text="Reference already exists")
        repo.branches[request["branch"]] = list(repo.branches["main"])
        return 200, {}, {}

    def _open_pull(self, repo):
        """Start a pull request from main; its number."""
        number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
        repo.branches[f"refs/pr/{number}"] = list(repo.branches["main"])
        return number

    def _discussion(self, request):
        repo = self._repo(request)
        if request["number"] is None:
            return 200, {}, {"num": self._open_pull(repo)}
        details = {"num": int(request["number"]), "title": "", "status": "draft", "events": [], "isPullRequest": True}
        details |= {"createdAt": "2026-01-01T00:00:00.000Z", "repo": {"name": request["repo"], "type": "model"}}
        return 200, {}, {**details, "changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}

    def _preupload(self, request):
        self._repo(request)
        paths = [file["path"] for file in json.loads(request["body"])["files"]]
        files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
        return 200, {}, {"files": files}

    def _commit(self, request):
        pull = "create_pr" in request["query"]
        branch = request["revision"]
        repo = self._repo(request, write=not pull and not branch.startswith("refs/pr/"))
        if pull:
            branch = f"refs/pr/{self._open_pull(repo)}"
        if branch not in repo.branches:
            raise RefusedError(404, "RevisionNotFound")
        title, files = "", dict(repo.branches[branch][-1][2])
        for line in request["body"].splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    title = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "deletedFile":
                    del files[value["path"]]
        oid = _sha(repr((title, sorted((name, _sha(content)) for name, content in files.items()))).encode())
        repo.branches[branch].append((oid, title, files))
        reply = {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{request['repo']}/commit/{oid}"}
        if pull:
            reply["pullRequestUrl"] = f"{self.endpoint}/{request['repo']}/discussions/{branch.rsplit('/', 1)[1]}"
        return 200, {}, reply

    def _dataset(self, request):
        if request["repo"] not in self.datasets:
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        return 200, {}, {"id": request["repo"], "sha": "c0ffee"}

    def _info(self, request):
        repo, (oid, _, files) = self._at(request)
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        data = {"_id": "1", "id": request["repo"], "modelId": request["repo"], "sha": oid, "private": repo.private}
        return 200, {}, {**data, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}

    def _tree(self, request):
        _, (_, _, files) = self._at(request)
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _sha(content)}
            for name, content in files.items()
        ]
        return 200, {}, entries

    def _resolve(self, request):
        _, (oid, _, files) = self._at(request)
        if request["file"] not in files:
            return 404, {"X-Repo-Commit": oid, "X-Error-Code": "EntryNotFound"}, {"error": "Entry not found"}
        content = files[request["file"]]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{_sha(content)}"', "Accept-Ranges": "bytes"}
        if part := re.match(r"bytes=(\d+)-(\d*)", request["handler"].headers.get("Range") or ""):
            start, stop = int(part[1]), int(part[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return 206, headers, content[start:stop]
        return 200, headers, content


def _body(handler):
    if length := int(handler.headers.get("Content-Length") or 0):
        return handler.rfile.read(length)
    content = b""
    if "chunked" in (handler.headers.get("Transfer-Encoding") or ""):
        while size := int(handler.rfile.readline().strip() or b"0", 16):
            content += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
    return content
