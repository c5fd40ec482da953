"""URLs from untrusted sources: allowed schemes, size limits, timeouts and retries."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from quire import BaseDocument, DocumentArray
from quire.errors import OptionError, SchemaError, UriError, UriTimeoutError
from quire.typing import AudioUrl, ImageUrl, Schemes, TextUrl
from tests.documents.conftest import BODY
from tests.files.http_server import serve_files


class Post(BaseDocument):
    picture: Annotated[ImageUrl, Schemes("https", "data")]
    text: Annotated[TextUrl, Schemes("http")] | None = None
    more: list[Annotated[ImageUrl, Schemes("https")]] = []


FORBIDDEN = [
    "/etc/passwd",
    "etc/passwd",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    " https://example.com/",
    "http://example.com/a.png",
    "s3://bucket/a.png",
    "simplecache::file:///etc/passwd",
    "https::file:///etc/passwd",
    "",
]


@pytest.mark.parametrize("address", FORBIDDEN)
def test_field_rejects_other_schemes(address: str) -> None:
    with pytest.raises(ValidationError, match="is not allowed here, only data and https"):
        Post(picture=address)
    with pytest.raises(ValidationError, match="not allowed here"):
        Post(picture="https://a/b", more=[address])


@pytest.mark.parametrize("address", FORBIDDEN)
def test_load_rejects_other_schemes(address: str) -> None:
    with pytest.raises(UriError, match="is not allowed here, only https"):
        ImageUrl(address).load(schemes=["https"])
    with pytest.raises(UriError, match="not allowed"):
        TextUrl(address).load_bytes(schemes=("HTTPS",))


def test_restricted_values_enforce_schemes_without_validation(tmp_path: Path) -> None:
    """Even a value that skipped validation cannot be read from another scheme."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    post = Post.model_construct(id="a", picture=type(Post(picture="https://a/b").picture)(str(secret)), text=None)
    for url in (post.picture, pickle.loads(pickle.dumps(post.picture))):
        with pytest.raises(UriError, match="a path is not allowed here, only data and https"):
            url.load_bytes()
        with pytest.raises(UriError, match="not allowed"):
            url.load_bytes(schemes=["file"])  # an argument cannot widen the restriction of the type


def test_assignment_to_wider_field_keeps_restriction() -> None:
    class Wide(BaseDocument):
        picture: ImageUrl

    narrow = Post(picture="https://a/b").picture
    assert type(Wide(picture=narrow).picture) is type(narrow)


def test_restricted_types_are_cached_and_pickled() -> None:
    first, second = (
        TypeAdapter(Annotated[ImageUrl, Schemes(*names)]) for names in (("https", "data"), ("data", "https"))
    )
    url = first.validate_python("https://a/b")
    assert type(url) is type(second.validate_python("https://a/b")) is type(pickle.loads(pickle.dumps(url)))
    assert pickle.loads(pickle.dumps(type(url))) is type(url)
    assert isinstance(url, ImageUrl)
    assert type(url) is not type(
        TypeAdapter(Annotated[AudioUrl, Schemes("https", "data")]).validate_python("https://a/b")
    )
    nested = Annotated[Annotated[ImageUrl, Schemes("https", "data")], Schemes("data", "file")]
    with pytest.raises(ValidationError, match="only data"):
        TypeAdapter(nested).validate_python("https://a/b")


def test_decoding_checks_schemes() -> None:
    class Loose(BaseDocument):
        __quire_name__ = "x"
        picture: str

    rows = DocumentArray[Loose]([Loose(picture="file:///etc/passwd")])
    with pytest.raises(ValueError, match="not allowed here"):
        DocumentArray[Post].from_bytes(rows.to_bytes())
    with pytest.raises(ValueError, match="not allowed here"):
        Post.from_json(rows[0].to_json())


def test_invalid_scheme_options_are_rejected() -> None:
    with pytest.raises(SchemaError, match="names of schemes"):
        Schemes()
    with pytest.raises(SchemaError, match="not for"):
        TypeAdapter(Annotated[int, Schemes("https")])
    with pytest.raises(OptionError, match="a list"):
        ImageUrl("https://a/b").load_bytes(schemes="https")
    with pytest.raises(OptionError, match="retries"):
        ImageUrl("a").load_bytes(retries=-1)


def test_redirects_stay_within_allowed_schemes(address: str) -> None:
    assert TextUrl(f"{address}/moved").load_bytes() == BODY
    assert TextUrl(f"{address}/moved").load_bytes(schemes=["http"]) == BODY
    for schemes in (None, ["http"], ["http", "file"]):
        with pytest.raises(UriError, match=r"/trap.*(302|points to)"):
            TextUrl(f"{address}/trap").load_bytes(schemes=schemes)


def test_redirect_to_disallowed_scheme_is_rejected() -> None:
    """A redirect from https to http is rejected."""
    from quire.files._http import _Redirects

    class Request:
        full_url = "https://a/b"

    with pytest.raises(UriError, match="points to http://a/c, which is not allowed"):
        _Redirects({"https"}).redirect_request(Request(), None, 302, "", {}, "http://a/c")


@pytest.mark.parametrize("path", ["silent", "drip"])
def test_timeout_covers_all_retries(address: str, path: str) -> None:
    with pytest.raises(UriTimeoutError, match=path):
        ImageUrl(f"{address}/{path}").load_bytes(timeout=0.3, retries=5)


def test_load_bytes_enforces_max_bytes(address: str) -> None:
    with pytest.raises(UriError, match="announces 10,000 bytes.*limit is 9,999"):
        ImageUrl(f"{address}/body").load_bytes(max_bytes=9999)
    with pytest.raises(UriError, match="more than that came"):
        ImageUrl(f"{address}/chunked").load_bytes(max_bytes=9999)
    assert ImageUrl(f"{address}/chunked").load_bytes(max_bytes=10_000) == BODY


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve_files({"a": b"content"}) as server:
        yield server


def test_transient_failures_are_retried(site: Any) -> None:
    site.failures = 2
    assert TextUrl(f"{site.url}/a").load() == "content"
    site.failures = 3
    with pytest.raises(UriError, match="503"):
        TextUrl(f"{site.url}/a").load()
    site.cuts, site.failures = 1, 1
    assert TextUrl(f"{site.url}/a").load() == "content"
    site.seen = []
    with pytest.raises(UriError, match="404"):
        TextUrl(f"{site.url}/b").load()
    assert len(site.seen) == 1  # a retry would not help
    site.failures, site.status, site.seen = 1, 403, []
    with pytest.raises(UriError, match="403"):
        TextUrl(f"{site.url}/a").load()
    assert len(site.seen) == 1
