"""`bridge.core.transport.address`: what a URL says, and what is said of one that cannot be read."""

import dataclasses
import pickle

import pytest

from bridge.core.transport.address import Address, parse_address
from bridge.errors import AddressError, shown_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://localhost:50051", ("grpc", "localhost", 50051)),
        ("grpcs://example.org:443/", ("grpcs", "example.org", 443)),
        ("host-a:50051", ("grpc", "host-a", 50051)),
        ("  127.0.0.1:1  ", ("grpc", "127.0.0.1", 1)),
        ("[::1]:50051", ("grpc", "::1", 50051)),
        ("grpc://HOST:65535", ("grpc", "host", 65535)),
        ("grpc://h:1/CartPole-v1", ("grpc", "h", 1, "CartPole-v1")),
        ("h:1/ALE/Pong-v5", ("grpc", "h", 1, "ALE/Pong-v5")),
        ("h:1/a%20b%2Fc", ("grpc", "h", 1, "a b/c")),
        ("h:1/E-v0?num_envs=8&kwargs.g=9.8", ("grpc", "h", 1, "E-v0", None, (("num_envs", "8"), ("kwargs.g", "9.8")))),
        ("h:1?b=2&a=", ("grpc", "h", 1, None, None, (("b", "2"), ("a", "")))),
        ("h:1?kwargs.url=http://x/y", ("grpc", "h", 1, None, None, (("kwargs.url", "http://x/y"),))),
        ("h:1?kwargs.text=a%26b+c", ("grpc", "h", 1, None, None, (("kwargs.text", "a&b c"),))),
        ("grpc://h:1?world=world-1", ("grpc", "h", 1, None, "world-1")),
        ("grpc://h:1/?world=", ("grpc", "h", 1, None, "")),
        ("unix:///run/my%20env?world=w", ("unix", "", 0, None, "w", (), "/run/my env")),
        ("unix:///s?env_id=ALE/Pong-v5&num_envs=8", ("unix", "", 0, "ALE/Pong-v5", None, (("num_envs", "8"),), "/s")),
    ],
)
def test_a_url_is_read_into_its_parts(url, expected):
    assert parse_address(url) == Address(url, *expected)


def test_the_target_has_brackets_around_an_ipv6_address_only():
    assert parse_address("grpc://[fe80::1]:50051/E").target == "[fe80::1]:50051"
    assert parse_address("grpc://host:50051/E").target == "host:50051"
    assert parse_address("unix:///run/a%20b?env_id=E").target == "unix:/run/a%20b"


def test_the_target_names_a_host_as_dns_does():
    assert parse_address("grpc://Bücher.example:1").target == "xn--bcher-kva.example:1"
    assert parse_address("grpc://例え.test:1").host == "例え.test"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "it is empty"),
        ("   ", "it is empty"),
        (50051, "of type int, not a string"),
        (None, "of type NoneType"),
        (b"host:1", "of type bytes"),
        ("http://host:50051", "http:// is not supported; use grpc://host:50051"),
        ("gprc://host:50051", "the scheme 'gprc' is none of"),
        ("grpc:host:50051", "no :// follows its scheme, grpc; write grpc://host:50051"),
        ("grpc//host:50051/E-v0", "no :// follows its scheme, grpc; write grpc://host:50051/E-v0"),
        ("WSS:/host:50051?token=secret", r"no :// follows its scheme, wss; write wss://host:50051\."),
        ("http:host:50051", "no :// follows its scheme, http; write grpc://host:50051"),
        ("50051", "it has a port alone, no host; for this machine write grpc://localhost:50051"),
        ("grpc://host", "it names no port"),
        ("host", "it names no port"),
        ("grpc://:50051", "it names no host"),
        ("grpc://", "it names no host"),
        ("/CartPole-v1", "it names no host"),
        ("grpc://a..b:1", "'a..b' is no name: between dots, a name has 1 to 63 letters"),
        ("grpc://" + "a" * 70 + ":1", "is no name: between dots, a name has 1 to 63 letters"),
        ("tcp://host:5000", "tcp:// is not supported; use grpc://host:5000"),
        (
            "tcps://host:5000/E-v0?num_envs=2",
            r"tcps:// is not supported; use grpcs://host:5000/E-v0\?num_envs=2",
        ),
        ("unix://run/s", "unix:///PATH, with three slashes"),
        ("unix:///", "unix:///PATH, with three slashes"),
        (f"unix:///{'x' * 107}", "the path of a Unix socket has at most 107 bytes"),
        (f"unix:///{'%C3%A4' * 54}", "the path of a Unix socket has at most 107 bytes"),
        ("unix:/run/s", "no :// follows its scheme, unix; write unix:///run/s"),
        ("grpc://host:0", "port 0 is for servers"),
        ("grpc://host:65536", "(?i)port"),
        ("grpc://host:-1", "(?i)port"),
        ("grpc://host:port", "(?i)port"),
        ("grpc://[::1:50051", "(?i)invalid ipv6"),
        ("::1:50051", r"an IPv6 address stands in brackets: grpc://\[::1\]:50051"),
        ("grpc://host:1#top", "what follows # has no meaning"),
        ("grpc://host:1?num_envs", "is not of the form name=value"),
        ("grpc://host:1?a=1&a=2", "gives 'a' twice"),
        ("grpc://host:1?world=x&num_envs=2", "joins a world that exists"),
        ("grpc://host:1/E-v0?world=x", "joins a world that exists"),
    ],
)
def test_a_url_that_cannot_be_read_says_why_and_shows_the_right_form(url, reason):
    with pytest.raises(AddressError, match=reason) as caught:
        parse_address(url)
    assert "Expected grpc://HOST:PORT" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "url",
    [
        "grpc://me:secret@host:50051",
        "grpc://me:secret@host",
        "grpc://me:secret@host:0",
        "tcp://me:secret@host:1",
        "http://me:secret@host:1",
        "me:secret@host:1",
        "grpc://me:secret@:99999",
        "grpc://me:se@secret@host:1",
        "grpc:me:secret@host:1",
        "grpc//me:secret@host:1",
    ],
)
def test_a_password_is_refused_and_never_shown(url):
    with pytest.raises(AddressError, match="user name") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value)


def test_an_empty_or_short_user_name_leaves_the_rest_of_the_message_readable():
    for url in ("grpc://@h:1", "grpc://h@h:1"):
        with pytest.raises(AddressError) as caught:
            parse_address(url)
        assert caught.value.url == "grpc://…@h:1"


def test_an_address_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_address("h:1").port = 2  # type: ignore[misc]


def test_a_port_of_a_url_without_one_is_that_of_the_web():
    assert (parse_address("ws://host/E-v0").port, parse_address("wss://host").port) == (80, 443)
    assert parse_address("wss://host:8443/ALE/Pong-v5").target == "host:8443"
    assert parse_address("ws://[::1]:1").tls is False
    assert parse_address("wss://[::1]:1").tls is True


@pytest.mark.parametrize(
    ("url", "shown", "token"),
    [
        ("grpc://h:1?token=abc", "grpc://h:1", "abc"),
        ("grpc://h:1/Env-v0?token=abc&num_envs=2", "grpc://h:1/Env-v0?num_envs=2", "abc"),
        ("h:1?num_envs=2&token=a%2Db", "h:1?num_envs=2", "a-b"),
        ("unix:///p?token=abc", "unix:///p", "abc"),
    ],
)
def test_the_token_of_a_url_is_shown_to_the_server_and_in_no_message(url, shown, token):
    address = parse_address(url)
    assert address.url == shown
    assert address.credentials.token.reveal() == token
    assert token not in repr(address)
    assert "token" not in dict(address.settings)


@pytest.mark.parametrize(
    "url",
    [
        "grpc://h:1?token=sec%20ret",
        "grpc://h?token=secret",
        "tcp://h:1?token=secret",
        "grpc://h:1?token=secret&x",
        "grpc://h:1/#token=secret",
    ],
)
def test_no_error_about_a_url_shows_its_token(url):
    with pytest.raises(AddressError) as caught:
        parse_address(url)
    assert "sec%20ret" not in str(caught.value)
    assert "token=s" not in str(caught.value)
    assert "=secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("grpc://h:1?tokn=hidden", "grpc://h:1?tokn=…"),
        ("grpc://h:1?num_envs=2&toekn=hidden#x", "grpc://h:1?num_envs=2&toekn=…#x"),
        ("grpc://h:1?%74oken=hidden", "grpc://h:1?%74oken=…"),
        ("grpc://h:1?access_token=hidden&token=hidden", "grpc://h:1?access_token=…"),
        ("http://h:1/#Tokens=hidden", "http://h:1/#Tokens=…"),
        ("grpc://h:1?hidden0123456789", "grpc://h:1?…"),
        ("grpc://h:1?num_envs=2&hidden0123456789", "grpc://h:1?num_envs=2&…"),
        ("grpc://h:1/Env-v0?num_envs=8&map_name=8x8", "grpc://h:1/Env-v0?num_envs=8&map_name=8x8"),
        ("grpc://h:1?num_envs", "grpc://h:1?num_envs"),
    ],
)
def test_a_token_whose_name_is_misspelled_or_missing_is_in_no_message(url, shown):
    assert shown_url(url) == shown
    with pytest.raises(AddressError) as caught:
        parse_address(f"no-scheme{url}")
    assert "hidden" not in str(caught.value)


def test_an_error_keeps_the_form_that_was_expected_in_a_copy():
    error = AddressError("ws:/h", "it names no host", "ws://HOST:PORT")
    assert str(error) == "cannot read the URL 'ws:/h': it names no host. Expected ws://HOST:PORT"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
