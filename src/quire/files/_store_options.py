"""The address and the `storage_options` of an object store, in the names of fsspec, as obstore's configuration."""

from __future__ import annotations

import importlib
import json
import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from quire._optional import is_installed
from quire.errors import MissingDependencyError, OptionError, StorageError, did_you_mean
from quire.files._fsspec import filesystem_class
from quire.files._uris import display_uri, scheme_of

KINDS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
}
"""The kinds of stores that obstore supports, by scheme."""
AWS = "https://s3.amazonaws.com"
_FSSPEC_ONLY = frozenset(
    (
        "asynchronous",
        "batch_size",
        "block_size",
        "blocksize",
        "cache_regions",
        "cache_type",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    )
)
"""Options for caches and threads of fsspec, which change no result: without fsspec, they have no effect."""


class UntranslatableError(Exception):
    """An option, or a value of it, that has no counterpart in obstore; an empty name stands for the address."""

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.name, self.known = name, known


@dataclass
class StoreSettings:
    """What obstore needs to open the store of a folder."""

    kind: str
    place: str
    """The bucket or container, or the address of a folder on a web server."""
    prefix: str
    """The path of the folder in the bucket."""
    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    """The AWS profile whose credentials boto3 has to find: those of a role, or of single sign-on."""

    def open(self, stores: Any, client: Mapping[str, Any], retry: Mapping[str, Any]) -> Any:
        """Return the store."""
        common = {"client_options": client, "retry_config": retry}
        if self.kind == "http":
            return stores.HTTPStore(self.place, **common)
        prefix = self.prefix or None
        if self.kind == "gs":
            return stores.GCSStore(self.place, prefix=prefix, **self.config, **common)
        if self.kind == "az":
            return stores.AzureStore(self.place, prefix=prefix, **self.config, **common)
        config = dict(self.config)
        if self.profile is not None:
            if not is_installed("boto3"):
                raise MissingDependencyError(
                    f"the AWS profile {self.profile!r} gets its keys from a role or from single sign-on, which needs "
                    "boto3: pip install boto3",
                    name="boto3",
                )
            session = importlib.import_module("boto3").Session(profile_name=self.profile)
            provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider(session)
            common["credential_provider"] = provider
        if "region" not in config:
            config["region"] = "us-east-1" if "endpoint" in config else _find_region(self.place)
        return stores.S3Store(self.place, prefix=prefix, **config, **common)


def translate_options(url: str, storage_options: Mapping[str, Any]) -> StoreSettings | None:
    """Return the settings for obstore; None if fsspec has to be used for one of the options.

    An option that neither knows is an OptionError.
    """
    scheme = scheme_of(url) or ""
    kind = KINDS[scheme]
    options = {name: value for name, value in storage_options.items() if name not in _FSSPEC_ONLY}
    try:
        return _TRANSLATIONS[kind](url, options)
    except UntranslatableError as error:
        implementation, where = filesystem_class(scheme), display_uri(url)
        if implementation is None and not error.name:
            raise StorageError(
                f"{where}: this address can be read with fsspec only: pip install {_PACKAGES[kind]}."
            ) from None
        name = error.name.partition(".")[0]
        if implementation is None or (name and name not in _parameters(implementation)):
            suggestion = f" {did_you_mean(error.name, error.known)}" if error.known else ""
            other = "" if implementation else f" If it is an option of {_PACKAGES[kind]}, install that package."
            raise OptionError(
                f"{where}: the storage option {error.name!r} is not known for this store.{suggestion}{other}"
            ) from None
    return None


_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "http": "fsspec[http]"}


def package_of(url: str) -> str:
    """Return the package with which fsspec reads an address."""
    return _PACKAGES[KINDS[scheme_of(url) or ""]]


def _parameters(implementation: type[Any]) -> set[str]:
    """Return the names of the options of a filesystem."""
    names: set[str] = set()
    for tp in implementation.__mro__:
        code = getattr(tp.__dict__.get("__init__"), "__code__", None)
        if code is not None:
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return names - {"self"}


class _Options:
    """Options that are taken one by one; those that are left have no translation."""

    def __init__(self, options: Mapping[str, Any], context: str = "") -> None:
        self._left, self._context = dict(options), context
        self._known: list[str] = []

    def take(self, *names: str) -> Any:
        """Return the first of these options that is not None."""
        self._known += names
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def finish(self) -> None:
        """Raise UntranslatableError if an option is left."""
        for name, value in self._left.items():
            if value is not None:
                raise UntranslatableError(self._context + name, tuple(self._known))


def _split(url: str) -> tuple[str, str]:
    """Return the bucket and the path in it."""
    place, _, prefix = url.partition("://")[2].partition("/")
    if "//" in f"/{prefix}":  # obstore would drop the empty name between the slashes, and read another file
        raise UntranslatableError("")
    return place, prefix.strip("/")


# --- S3


def _translate_s3(url: str, storage_options: Mapping[str, Any]) -> StoreSettings:
    bucket, prefix = _split(url)
    options = _Options(storage_options)
    nested = _Options(options.take("client_kwargs") or {}, "client_kwargs.")
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    keys = {
        "access_key_id": options.take("key", "username") or nested.take("aws_access_key_id"),
        "secret_access_key": options.take("secret", "password") or nested.take("aws_secret_access_key"),
        "session_token": options.take("token") or nested.take("aws_session_token"),
    }
    profile_name = options.take("profile")
    profile, source = _read_profile(profile_name)
    environment = _first(os.environ, "AWS_ACCESS_KEY_ID")
    if options.take("anon"):
        config["skip_signature"] = True
    elif any(keys.values()):
        config.update({name: value for name, value in keys.items() if value is not None})
    elif profile_name is not None or not environment:
        static = {
            "access_key_id": profile.get("aws_access_key_id"),
            "secret_access_key": profile.get("aws_secret_access_key"),
            "session_token": profile.get("aws_session_token"),
        }
        if static["access_key_id"]:
            config.update({name: value for name, value in static.items() if value})
            source = None
        elif not any(name in profile for name in _DYNAMIC_PROFILE):
            source = None
    else:
        source = None
    region = options.take("region", "region_name") or nested.take("region_name")
    region = region or _first(os.environ, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    endpoint = options.take("endpoint_url") or nested.take("endpoint_url")
    endpoint = endpoint or _first(os.environ, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    if region:
        config["region"] = region
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
        client["allow_http"] = endpoint.startswith("http://")
    if options.take("requester_pays"):
        config["request_payer"] = True
    config["disable_bulk_delete"] = True  # not every store with the interface of S3 can delete many files at once
    if options.take("use_ssl") is False and not endpoint:
        raise UntranslatableError("use_ssl")
    _translate_verify(nested, client)
    nested.finish()
    _check_addressing(options)
    options.finish()
    is_signed = not config.get("skip_signature") and "access_key_id" not in config
    return StoreSettings("s3", bucket, prefix, config, client, source if is_signed else None)


_DYNAMIC_PROFILE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "credential_source")


def _check_addressing(options: _Options) -> None:
    """Accept botocore's option for the addresses that obstore uses: host/bucket/key."""
    nested = _Options(options.take("config_kwargs") or {}, "config_kwargs.")
    style = dict(nested.take("s3") or {})
    if style.pop("addressing_style", "path") not in ("path", "auto") or style:
        raise UntranslatableError("config_kwargs")
    nested.finish()


def _translate_verify(nested: _Options, client: dict[str, Any]) -> None:
    """Translate whether, and with which certificates, a server is verified."""
    verify = nested.take("verify")
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, (str, os.PathLike)):
        client["root_certificate"] = Path(verify).read_text()


def _read_profile(name: str | None) -> tuple[dict[str, str], str | None]:
    """Return the settings of an AWS profile and its name; a profile that was asked for has to exist."""
    requested = name or _first(os.environ, "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
    folder = Path("~/.aws").expanduser()
    section = requested or "default"
    places = (
        (os.environ.get("AWS_CONFIG_FILE") or folder / "config", f"profile {section}"),
        (os.environ.get("AWS_CONFIG_FILE") or folder / "config", section if section == "default" else ""),
        (os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials", section),
    )
    configparser = importlib.import_module("configparser")  # rarely needed
    settings: dict[str, str] = {}
    exists = False
    for path, title in places:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, "utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: this is not a file of AWS profiles ({error}).") from error
        if parser.has_section(title):
            exists = True
            settings.update(parser.items(title))
    if requested and not exists:
        raise OptionError(
            f"the AWS profile {requested!r} is in neither {places[0][0]} nor {places[2][0]}. Check the option "
            "'profile' and the variable AWS_PROFILE."
        )
    return settings, section if exists else None


@cache
def _find_region(bucket: str) -> str:
    """Ask AWS for the region of a bucket, which requests have to be signed for."""
    request = importlib.import_module("urllib.request")  # slow to import, and rarely needed
    query = request.Request(f"{AWS}/{quote(bucket)}", method="HEAD", headers={"User-Agent": "quire"})
    try:
        with request.urlopen(query, timeout=10) as response:
            headers = response.headers
    except request.HTTPError as error:  # a refusal has the header, too
        headers = error.headers
        error.close()
    return str(headers.get("x-amz-bucket-region") or "us-east-1")


# --- Google Cloud Storage


def _translate_gs(url: str, storage_options: Mapping[str, Any]) -> StoreSettings:
    bucket, prefix = _split(url)
    options = _Options(storage_options)
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    options.take("project", "access")  # of new buckets; a request without the right to write fails
    token = options.take("token")
    endpoint = options.take("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    is_anonymous = options.take("anon") or token == "anon"  # noqa: S105 - gcsfs calls it a token
    is_emulated = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
    is_anonymous = is_anonymous or (is_emulated and token in (None, "google_default", "cloud"))
    if is_anonymous:
        config["skip_signature"] = True
    elif isinstance(token, Mapping):
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, (str, os.PathLike)) and Path(token).is_file():
        is_account = json.loads(Path(token).read_text()).get("type") == "service_account"
        config["service_account" if is_account else "application_credentials"] = os.fspath(token)
    elif token not in (None, "google_default", "cloud"):
        raise UntranslatableError("token")
    if endpoint:
        endpoint = (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")
        config["base_url"] = endpoint
        if is_anonymous:
            # Even without signatures, obstore asks for a token before it writes; emulators need none.
            account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
            config["service_account_key"] = json.dumps({**account, "gcs_base_url": endpoint})
        client["allow_http"] = endpoint.startswith("http://")
    options.finish()
    return StoreSettings("gs", bucket, prefix, config, client)


# --- Azure


def _translate_az(url: str, storage_options: Mapping[str, Any]) -> StoreSettings:
    container, prefix = _split(url)
    container, _, host = container.partition("@")
    options = _Options(storage_options)
    connection = options.take("connection_string")
    if connection is None and not storage_options:
        connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    parts = dict(part.split("=", 1) for part in (connection or "").split(";") if "=" in part)
    config = {
        "account_name": options.take("account_name") or parts.get("AccountName") or host.partition(".")[0] or None,
        "account_key": options.take("account_key") or parts.get("AccountKey"),
        "sas_key": options.take("sas_token") or parts.get("SharedAccessSignature"),
        "tenant_id": options.take("tenant_id"),
        "client_id": options.take("client_id"),
        "client_secret": options.take("client_secret"),
        "endpoint": parts.get("BlobEndpoint"),
        "skip_signature": True if options.take("anon") else None,
    }
    account_host = options.take("account_host")
    if account_host:
        config["endpoint"] = account_host if "://" in account_host else f"https://{account_host}"
    options.finish()
    config = {name: value for name, value in config.items() if value is not None}
    client: dict[str, Any] = {}
    if config.get("endpoint"):
        config["endpoint"] = config["endpoint"].rstrip("/")
        client["allow_http"] = config["endpoint"].startswith("http://")
    return StoreSettings("az", container, prefix, config, client)


# --- web servers


def _translate_http(url: str, storage_options: Mapping[str, Any]) -> StoreSettings:
    parts = urlsplit(url)
    if parts.query or parts.fragment or "//" in parts.path:
        raise UntranslatableError("")
    options = _Options(storage_options)
    nested = _Options(options.take("client_kwargs") or {}, "client_kwargs.")
    headers = {**dict(nested.take("headers") or {}), **dict(options.take("headers") or {})}
    nested.finish()
    options.finish()
    credentials, at, host = parts.netloc.rpartition("@")
    if at:  # obstore would drop them
        encoded = b64encode(unquote(credentials).encode()).decode()
        headers = {"Authorization": f"Basic {encoded}", **headers}
    client: dict[str, Any] = {"allow_http": parts.scheme.lower() == "http"}
    if headers:
        client["default_headers"] = headers
    return StoreSettings("http", parts._replace(netloc=host).geturl().rstrip("/"), "", {}, client)


_TRANSLATIONS: dict[str, Callable[[str, Mapping[str, Any]], StoreSettings]] = {
    "s3": _translate_s3,
    "gs": _translate_gs,
    "az": _translate_az,
    "http": _translate_http,
}


def _first(values: Mapping[str, str], *names: str) -> str | None:
    return next((values[name] for name in names if values.get(name)), None)
