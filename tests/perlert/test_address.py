import pickle

import pytest

from bridge.errors import AddressError
from bridge.perlert.address import parse_perlert_address
from bridge.perlert.protocol.packet import Header


def test_a_url_says_host_port_and_instance():
    address = parse_perlert_address("perlert://localhost:32322/cartpole:3")
    assert (address.host, address.port, address.header) == ("localhost", 32322, Header("cartpole", 3))
    assert (address.agent, address.tag) == (None, None)


def test_a_url_may_name_the_slot_and_the_tag_and_leave_the_number_out():
    address = parse_perlert_address("perlert://[::1]:1/city?agent=agent0&tag=joe")
    assert (address.host, address.header, address.agent, address.tag) == ("::1", Header("city", 0), "agent0", "joe")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "perlert://",
        "perlert://localhost/cartpole:0",
        "perlert://:1/cartpole:0",
        "perlert://h:0/c:0",
        "perlert://h:1",
        "perlert://h:1/",
        "perlert://h:99999/c:0",
        "perlert://a..b:1/c:0",
        "perlert://h:1/c:x",
        "perlert://h:1/c:-1",
        "perlert://h:1/a:b:1",
        "grpc://h:1/c:0",
        "perlert://h:1/c:0?slot=1",
        "perlert://h:1/c:0?agent=a&agent=b",
        "perlert://h:1/c:0?agent=",
        "perlert://h:1/c:0?agent=ready",
        "perlert://h:1/c:0?x",
        "perlert://u@h:1/c:0",
        "perlert://h:1/c:0#x",
        "perlert://h:1/a,b:0",
        7,
    ],
)
def test_a_url_that_cannot_be_read_is_an_error_that_shows_the_form(url):
    with pytest.raises(AddressError, match="perlert://HOST:PORT/NAME:NUMBER") as caught:
        parse_perlert_address(url)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
