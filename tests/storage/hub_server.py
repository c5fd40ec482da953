"""A Hugging Face Hub on loopback: the calls of huggingface_hub for datasets, over real HTTP, with counters and faults.

It keeps repositories with branches and commits, large files by digest, and the Parquet branch of converted datasets.
Large files are redirected to signed addresses, as the Hub does to its content delivery network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.files.http_server import LoopbackServer

LARGE = (".parquet", ".arrow")
"""Files that are stored by digest, as .gitattributes of new datasets says."""
TOKEN = "hf_loopback"
"""The token that may read private repositories and write."""


@dataclass
class Request:
    """One request: what the client asked for."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def kind(self) -> str:
        """The call, without names and revisions: 'refs', 'tree', 'resolve', 'cdn', ..."""
        if self.path.startswith(("/cdn/", "/lfs/")):
            return self.path.split("/")[1]
        match = re.search(r"/(refs|tree|revision|paths-info|resolve|preupload|commit|branch|batch)(?:/|$)", self.path)
        return match[1] if match else self.path.rpartition("/")[2] if self.method == "POST" else "info"


@dataclass
class Repository:
    """Commits by id, each with its files by path, and the commits of branches and other references."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: Mapping[str, bytes], ref: str = "refs/heads/main", message: str = "") -> str:
        commit = secrets.token_hex(20)
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        self.messages.append(message)
        return commit

    def files(self, revision: str) -> dict[str, bytes] | None:
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        commit = next((self.refs[name] for name in names if name in self.refs), revision)
        return self.commits.get(commit)

    def commit_of(self, revision: str) -> str:
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((self.refs[name] for name in names if name in self.refs), revision)


class Hub(LoopbackServer):
    """The server. Faults: `limited` requests are answered with 429, and `cuts` bodies of large files break off."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.signature = "first"
        self.limited, self.retry_after, self.cuts = 0, "1", 0
        self.before_commit: Any = None
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, name: str, files: Mapping[str, bytes] | None = None, *, private: bool = False) -> Repository:
        self.repositories[name] = repository = Repository(private)
        repository.commit(files or {})
        return repository

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        files = self.repositories[name].files(revision)
        assert files is not None
        return files

    def count(self) -> dict[str, int]:
        """Return the number of requests of each kind since the last call."""
        with self.lock:
            counts: dict[str, int] = {}
            for request in self.requests:
                counts[request.kind] = counts.get(request.kind, 0) + 1
            self.requests.clear()
        return counts


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.route("GET")

    def do_HEAD(self) -> None:
        self.route("HEAD")

    def do_POST(self) -> None:
        self.route("POST")

    def do_PUT(self) -> None:
        self.route("PUT")

    def route(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.body = self.read_body()
        request = Request(
            method, unquote(parts.path), query, {key.lower(): value for key, value in self.headers.items()}
        )
        with self.server.lock:
            if request.path != "/api/agent-harnesses":  # the client asks for it once, on some machines
                self.server.requests.append(request)
            is_limited = self.server.limited > 0
            self.server.limited -= is_limited
        if is_limited:
            self.answer(429, b"slow down", {"Retry-After": self.server.retry_after})
            return
        for pattern, handle in ROUTES:
            match = re.fullmatch(pattern, f"{method} {parts.path}")
            if match:
                handle(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
                return
        self.answer(404, f"no route for {method} {self.path}".encode())

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    # --- answers

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer_content(self, content: bytes, headers: Mapping[str, str]) -> None:
        """Answer with a file, or the range of it that the client asked for."""
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        status, body, more = 200, content, {"Accept-Ranges": "bytes"}
        if span:
            start = int(span[1]) if span[1] else max(0, len(content) - int(span[2]))
            end = min(int(span[2]) + 1 if span[1] and span[2] else len(content), len(content))
            if start >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            status, body = 206, content[start:end]
            more["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        with self.server.lock:
            is_cut = self.server.cuts > 0 and self.command == "GET"
            self.server.cuts -= is_cut
        if is_cut:
            self.send_response(status)
            for name, value in {**headers, **more, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.answer(status, body, {**headers, **more})

    def error(self, status: int, code: str) -> None:
        self.answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    def find(self, repo: str, revision: str | None = None, *, write: bool = False) -> Repository | None:
        """Return a repository that the client may see; otherwise, answer with an error."""
        repository = self.server.repositories.get(repo)
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not is_known):
            self.error(401 if not is_known else 404, "RepoNotFound")
            return None
        if write and not is_known:
            self.error(403, "Forbidden")
            return None
        if revision is not None and repository.files(revision) is None:
            self.error(404, "RevisionNotFound")
            return None
        return repository

    # --- calls

    def info(self, repo: str, revision: str = "main") -> None:
        repository = self.find(repo, revision or "main")
        if repository is not None:
            files = repository.files(revision or "main") or {}
            self.answer_json(
                {
                    "id": repo,
                    "sha": repository.commit_of(revision or "main"),
                    "private": repository.private,
                    "gated": False,
                    "disabled": False,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in files],
                }
            )

    def refs(self, repo: str) -> None:
        repository = self.find(repo)
        if repository is None:
            return
        groups: dict[str, list[Any]] = {"branches": [], "tags": [], "converts": []}
        starts = {"refs/heads/": "branches", "refs/tags/": "tags", "refs/convert/": "converts"}
        if self.query.get("include_prs"):
            groups["pullRequests"] = []
            starts["refs/pr/"] = "pullRequests"
        for ref, commit in repository.refs.items():
            for start, group in starts.items():
                if ref.startswith(start):
                    groups[group].append({"name": ref.removeprefix(start), "ref": ref, "targetCommit": commit})
        self.answer_json(groups)

    def tree(self, repo: str, revision: str, path: str = "") -> None:
        repository = self.find(repo, revision)
        if repository is None:
            return
        files = repository.files(revision) or {}
        inside = {name: content for name, content in files.items() if not path or name.startswith(f"{path}/")}
        if path and not inside:
            self.error(404, "EntryNotFound")
            return
        entries, folders = [], set()
        for name, content in inside.items():
            below = name[len(path) + 1 if path else 0 :].split("/")
            start = f"{path}/" if path else ""
            folders |= {start + "/".join(below[:depth]) for depth in range(1, len(below))}
            if self.query.get("recursive") in ("True", "true", "1") or len(below) == 1:
                entries.append(describe_file(name, content))
        if self.query.get("recursive") not in ("True", "true", "1"):
            folders = {name for name in folders if "/" not in name[len(path) + 1 if path else 0 :]}
        listed = sorted([*entries, *(describe_folder(name) for name in folders)], key=lambda entry: entry["path"])
        size = int(self.query.get("limit", 1000))
        start_at = int(self.query.get("cursor", 0))
        page, headers = listed[start_at : start_at + size], {"Content-Type": "application/json"}
        if start_at + size < len(listed):
            recursive = self.query.get("recursive", "False")
            link = f"{self.server.endpoint}{urlsplit(self.path).path}?recursive={recursive}&cursor={start_at + size}"
            headers["Link"] = f'<{link}>; rel="next"'
        self.answer(200, json.dumps(page).encode(), headers)

    def paths_info(self, repo: str, revision: str) -> None:
        repository = self.find(repo, revision)
        if repository is None:
            return
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode()).get("paths", [])
        files = repository.files(revision) or {}
        known = [describe_file(name, files[name]) for name in paths if name in files]
        folders = [name for name in paths if any(other.startswith(f"{name}/") for other in files)]
        self.answer_json([*known, *map(describe_folder, folders)])

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.find(repo, revision)
        if repository is None:
            return
        content = (repository.files(revision) or {}).get(path)
        if content is None:
            self.error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": repository.commit_of(revision), "ETag": f'"{git_digest(content)}"'}
        if not path.endswith(LARGE):
            self.answer_content(content, headers)
            return
        digest = hashlib.sha256(content).hexdigest()
        self.server.large[digest] = content
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
        # Another host, so that clients do not send their token there.
        host = f"http://localhost:{self.server.server_address[1]}"
        headers["Location"] = f"{host}/cdn/{digest}?signature={self.server.signature}"
        self.answer(302, b"", headers)

    def cdn(self, digest: str) -> None:
        if self.query.get("signature") != self.server.signature or "Authorization" in self.headers:
            self.answer(403, b"the signature has expired, or a token came along")
            return
        self.answer_content(self.server.large[digest], {"ETag": f'"{digest}"'})

    def create_repo(self) -> None:
        content = json.loads(self.body)
        organization = content.get("organization")
        name = content["name"] if "/" in content["name"] or not organization else f"{organization}/{content['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.error(401, "Unauthorized")
        elif name in self.server.repositories:
            self.answer_json({"url": f"{self.server.endpoint}/datasets/{name}"}, 409)
        else:
            is_private = content.get("private") is True or content.get("visibility") == "private"
            self.server.create(name, {".gitattributes": b"*.parquet filter=lfs\n"}, private=is_private)
            self.answer_json({"url": f"{self.server.endpoint}/datasets/{name}", "id": name})

    def create_branch(self, repo: str, branch: str) -> None:
        repository = self.find(repo, write=True)
        if repository is None:
            return
        if f"refs/heads/{branch}" in repository.refs:
            self.error(409, "BranchExists")
            return
        repository.refs[f"refs/heads/{branch}"] = repository.commit_of("main")
        self.answer_json({})

    def preupload(self, repo: str, revision: str) -> None:
        if self.find(repo, revision, write=True) is not None:
            files = json.loads(self.body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in files
            ]
            self.answer_json({"files": modes})

    def batch(self, repo: str) -> None:
        if self.find(repo, write=True) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.large:
                entry["actions"] = {"upload": {"href": f"{self.server.endpoint}/lfs/{item['oid']}"}}
            objects.append(entry)
        self.answer_json({"transfer": "basic", "objects": objects})

    def upload(self, digest: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != digest:
            self.answer(400, b"another content")
            return
        self.server.large[digest] = self.body
        self.answer(200)

    def commit(self, repo: str, revision: str) -> None:
        repository = self.find(repo, revision, write=True)
        if repository is None:
            return
        if self.server.before_commit is not None:
            callback, self.server.before_commit = self.server.before_commit, None
            callback()
        files, message = dict(repository.files(revision) or {}), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, repository.commit_of(revision)):
                    self.answer_json({"error": "A commit has happened since. Please refresh and try again."}, 412)
                    return
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.server.large:
                    self.answer_json({"error": f"{value['path']} was not uploaded"}, 400)
                    return
                files[value["path"]] = self.server.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                files = {name: content for name, content in files.items() if not name.startswith(value["path"])}
        commit = repository.commit(files, f"refs/heads/{revision}", message)
        url = f"{self.server.endpoint}/datasets/{repo}/commit/{commit}"
        self.answer_json({"commitUrl": url, "commitOid": commit, "success": True})

    def validate(self) -> None:
        self.answer_json({"errors": [], "warnings": []})

    def who_am_i(self) -> None:
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.answer_json({"name": "owner", "type": "user", "orgs": []}, 200 if is_known else 401)


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = (
    (rf"(?:GET|HEAD) /api/datasets/{REPO}", HubHandler.info),
    (rf"GET /api/datasets/{REPO}/revision/(?P<revision>[^/]+)", HubHandler.info),
    (rf"GET /api/datasets/{REPO}/refs", HubHandler.refs),
    (rf"GET /api/datasets/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", HubHandler.tree),
    (rf"POST /api/datasets/{REPO}/paths-info/(?P<revision>[^/]+)", HubHandler.paths_info),
    (rf"(?:GET|HEAD) /datasets/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", HubHandler.resolve),
    (r"(?:GET|HEAD) /cdn/(?P<digest>\w+)", HubHandler.cdn),
    (r"POST /api/repos/create", HubHandler.create_repo),
    (rf"POST /api/datasets/{REPO}/branch/(?P<branch>[^/]+)", HubHandler.create_branch),
    (rf"POST /api/datasets/{REPO}/preupload/(?P<revision>[^/]+)", HubHandler.preupload),
    (rf"POST /datasets/{REPO}\.git/info/lfs/objects/batch", HubHandler.batch),
    (r"PUT /lfs/(?P<digest>\w+)", HubHandler.upload),
    (rf"POST /api/datasets/{REPO}/commit/(?P<revision>[^/]+)", HubHandler.commit),
    (r"POST /api/validate-yaml", HubHandler.validate),
    (r"GET /api/whoami-v2", HubHandler.who_am_i),
)


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def describe_file(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": git_digest(content), "size": len(content), "path": name}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def describe_folder(name: str) -> dict[str, Any]:
    return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Serve an empty Hub."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def use_endpoint(hub: Hub, patch: pytest.MonkeyPatch, token: str | None = TOKEN) -> None:
    """Let huggingface_hub and datasets of this process talk to a server; they read the environment when imported."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has large files by digest only
    patch.setenv("HF_ENDPOINT", hub.endpoint)  # for processes that are started
    patch.setenv("HF_HUB_DISABLE_XET", "1")
    patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    if token is None:
        patch.delenv("HF_TOKEN", raising=False)
    else:
        patch.setenv("HF_TOKEN", token)
