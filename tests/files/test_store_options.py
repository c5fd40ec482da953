"""Options of object stores, in the names of fsspec, as the configuration of obstore."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import MissingDependencyError, OptionError, StorageError
from quire.files import RemoteOptions, _store_options, open_folder
from quire.files._store_options import StoreSettings, translate_options
from tests.files.s3_server import S3Server, run_s3_server

pytestmark = pytest.mark.needs("obstore", "fsspec", "s3fs")

KEYS = {"access_key_id": "k", "secret_access_key": "s"}
PEM = "-----BEGIN CERTIFICATE-----"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the configuration of the machine on which the tests run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


def translate(url: str, **options: Any) -> StoreSettings:
    settings = translate_options(url, options)
    assert settings is not None
    settings.config.pop("disable_bulk_delete", None)
    return settings


# --- S3


@pytest.mark.parametrize(
    ("options", "config", "client"),
    [
        ({"key": "k", "secret": "s"}, KEYS, {}),
        ({"key": "k", "secret": "s", "token": "t"}, {**KEYS, "session_token": "t"}, {}),
        ({"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}, KEYS, {}),
        ({"anon": True, "key": "k"}, {"skip_signature": True}, {}),
        ({"anon": False}, {}, {}),
        ({"endpoint_url": "http://host:9000/"}, {"endpoint": "http://host:9000"}, {"allow_http": True}),
        ({"client_kwargs": {"endpoint_url": "https://host"}}, {"endpoint": "https://host"}, {"allow_http": False}),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, {"region": "eu-west-1"}, {}),
        ({"region": "eu-west-1"}, {"region": "eu-west-1"}, {}),
        ({"requester_pays": True}, {"request_payer": True}, {}),
        ({"client_kwargs": {"verify": False}}, {}, {"allow_invalid_certificates": True}),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, {}, {}),
        ({"default_block_size": 1, "skip_instance_cache": True}, {}, {}),
        ({"secret": None, "use_ssl": True}, {}, {}),
    ],
    ids=str,
)
def test_options_of_s3fs_are_translated(
    options: dict[str, Any], config: dict[str, Any], client: dict[str, Any]
) -> None:
    settings = translate("s3://bucket/a/b/", **options)
    assert (settings.place, settings.prefix) == ("bucket", "a/b")
    assert settings.config == config
    assert settings.client == client


def test_certificate_of_private_authority_is_read(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(PEM)
    settings = translate("s3://bucket", client_kwargs={"verify": str(tmp_path / "ca.pem")})
    assert settings.client == {"root_certificate": PEM}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enpoint_url": "http://a"}, "storage option 'enpoint_url' is not known .* Did you mean 'endpoint_url'"),
        ({"client_kwarg": {}}, "storage option 'client_kwarg' is not known"),
    ],
)
def test_unknown_option_raises_error_with_suggestion(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^s3://bucket/a: the {message}"):
        open_folder("s3://bucket/a", RemoteOptions(storage_options=options))


def test_option_of_missing_package_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store_options, "filesystem_class", lambda _: None)
    message = (
        "the storage option 's3_additional_kwargs' is not known .*If it is an option of s3fs, install that package"
    )
    with pytest.raises(OptionError, match=message):
        translate_options("s3://bucket/a", {"s3_additional_kwargs": {}})
    with pytest.raises(StorageError, match="this address can be read with fsspec only: pip install s3fs"):
        translate_options("s3://bucket//a", {})


@pytest.mark.parametrize(
    "options",
    [{"s3_additional_kwargs": {}}, {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"use_ssl": False}],
    ids=str,
)
def test_options_without_translation_are_left_to_fsspec(options: dict[str, Any]) -> None:
    assert translate_options("s3://bucket/a", options) is None


def test_endpoint_and_region_come_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    settings = translate("s3://bucket")
    assert settings.config == {"endpoint": "http://host:1", "region": "eu-central-1"}
    assert settings.client == {"allow_http": True}


def test_keys_come_from_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["/bucket/a"] = b"abc"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert open_folder("s3://bucket").read("a") == b"abc"
    assert "Credential=from-environment/" in server.headers[0]["authorization"]


def write_profiles(tmp_path: Path) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(
        "[default]\nregion = us-west-2\n[profile work]\nregion = eu-west-1\nendpoint_url = https://work\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = work\n"
    )
    (folder / "credentials").write_text(
        "[work]\naws_access_key_id = k\naws_secret_access_key = s\n"
        "[other]\naws_access_key_id = o\naws_secret_access_key = p\naws_session_token = t\n"
    )


def test_profiles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profiles(tmp_path)
    assert translate("s3://bucket").config == {"region": "us-west-2"}
    work = {**KEYS, "region": "eu-west-1", "endpoint": "https://work"}
    assert translate("s3://bucket", profile="work").config == work
    monkeypatch.setenv("AWS_PROFILE", "other")
    other = {"access_key_id": "o", "secret_access_key": "p", "session_token": "t"}
    assert translate("s3://bucket").config == other
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    assert translate("s3://bucket").config == {}  # obstore reads the environment
    assert translate("s3://bucket", profile="work").config == work


def test_profile_of_role_is_left_to_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profiles(tmp_path)
    settings = translate("s3://bucket", profile="role")
    assert settings.profile == "role"
    assert translate("s3://bucket", profile="role", anon=True).profile is None
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingDependencyError, match="the AWS profile 'role' .* needs boto3: pip install boto3"):
        settings.open(None, {}, {})


def test_missing_profile_raises_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"the AWS profile 'nosuch' is in neither {tmp_path}/.aws/config nor"):
        translate("s3://bucket", profile="nosuch")


def test_region_of_bucket_is_requested_once(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[str] = []

    class Stores:
        @staticmethod
        def S3Store(bucket: str, *, region: str, **_: Any) -> None:  # noqa: N802 - obstore's name
            regions.append(f"{bucket} {region}")

    monkeypatch.setattr(_store_options, "AWS", server.endpoint)
    monkeypatch.setattr("tests.files.s3_server._Handler.do_HEAD", _answer_region)
    for _ in range(2):
        translate("s3://some-bucket/a").open(Stores, {}, {})
    assert regions == ["some-bucket ap-south-1"] * 2
    assert len(server.seen) == 1


def _answer_region(handler: Any) -> None:
    handler._begin()
    handler._answer(403, x_amz_bucket_region="ap-south-1")


# --- Google Cloud Storage and Azure


def test_google_store_is_read_from_custom_endpoint(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["/bucket/data/a b"] = b"abc"
    options = RemoteOptions(retries=0, storage_options={"endpoint_url": server.endpoint, "token": "anon"})
    for scheme in ("gs", "gcs"):
        assert open_folder(f"{scheme}://bucket/data", options).read_range("a b", 1, 3) == b"bc"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint.removeprefix("http://"))
    assert open_folder("gs://bucket/data").read("a b") == b"abc"


def test_options_of_gcsfs_are_translated(tmp_path: Path) -> None:
    account, user = tmp_path / "account.json", tmp_path / "user.json"
    account.write_text('{"type": "service_account"}')
    user.write_text('{"type": "authorized_user"}')
    assert translate("gs://b", token="google_default", project="p").config == {}
    assert translate("gs://b", token=str(account)).config == {"service_account": str(account)}
    assert translate("gs://b", token=str(user)).config == {"application_credentials": str(user)}
    assert translate("gs://b", token={"type": "x"}).config == {"service_account_key": '{"type": "x"}'}


def test_azure_container_is_read_from_custom_endpoint(server: S3Server) -> None:
    server.objects["/container/data/a"] = b"abc"
    options = RemoteOptions(
        retries=0, storage_options={"account_name": "name", "account_host": server.endpoint, "anon": True}
    )
    for url in ("az://container/data", "abfs://container/data", "abfss://container@name.dfs.core.windows.net/data"):
        assert open_folder(url, options).read_range("a", 1, 3) == b"bc"


def test_options_of_adlfs_are_translated() -> None:
    connection = "DefaultEndpointsProtocol=https;AccountName=n;AccountKey=a2V5==;EndpointSuffix=core.windows.net"
    assert translate("az://c/p", connection_string=connection).config == {"account_name": "n", "account_key": "a2V5=="}
    assert translate("az://c/p", account_name="n", sas_token="sv=1").config == {"account_name": "n", "sas_key": "sv=1"}
    assert translate("abfs://c@n.dfs.core.windows.net/p").config == {"account_name": "n"}
    secret = {"tenant_id": "t", "client_id": "i", "client_secret": "s"}
    assert translate("az://c/p", account_name="n", **secret).config == {"account_name": "n", **secret}


def test_sas_token_is_in_no_message(server: S3Server) -> None:
    options = {"account_name": "name", "account_host": server.endpoint, "sas_token": "sv=2024&sig=c2VjcmV0"}
    folder = open_folder("az://container/data", RemoteOptions(retries=0, storage_options=options))
    server.shutdown()
    server.server_close()
    with pytest.raises(StorageError) as caught:
        folder.read("a")
    assert "c2VjcmV0" not in str(caught.value) + str(caught.value.__cause__)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__suppress_context__


# --- web servers


def test_headers_are_sent(server: S3Server) -> None:
    server.objects["/data/a"] = b"abc"
    options = RemoteOptions(storage_options={"headers": {"X-Token": "t"}})
    url = server.endpoint.replace("://", "://user:pw@")
    assert open_folder(f"{url}/data", options).read("a") == b"abc"
    assert server.headers[0]["x-token"] == "t"
    assert server.headers[0]["authorization"].startswith("Basic ")
    assert server.headers[0]["user-agent"] == "quire"


def test_options_without_translation_for_http_are_left_to_fsspec() -> None:
    assert translate_options("http://host/a", {"client_kwargs": {"auth": None, "trust_env": True}}) is None
    assert translate_options("http://host/a?token=x", {}) is None
    with pytest.raises(OptionError, match="the storage option 'header' is not known .*Did you mean 'headers'"):
        translate_options("http://host/a", {"header": {}})
