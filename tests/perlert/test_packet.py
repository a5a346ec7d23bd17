import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import PacketError
from bridge.perlert.protocol.packet import (
    MAX_CLIENT_MESSAGE,
    MAX_MESSAGE,
    RESERVED_KEYS,
    Action,
    Header,
    LobbyInfo,
    LobbyRequest,
    Message,
    ReadyMessage,
    Register,
    Registered,
    Slot,
    Start,
    Step,
    check_label,
    format_message,
    parse_client,
    parse_server,
)

CITY = Header("city", 7)

CLIENT_GOLDEN = [
    (b"city:7;lobby", LobbyRequest(CITY)),
    (b"city:7;register=agent0,patrick", Register(CITY, "agent0", "patrick")),
    (b"city:7;register=agent0,", Register(CITY, "agent0", "")),
    (b"city:7;ready=agent0,true", ReadyMessage(CITY, "agent0", True)),
    (b"city:7;ready=agent0,false", ReadyMessage(CITY, "agent0", False)),
    (b"city:7;action=walk", Action(CITY, "walk")),
    (b"city:7;action=5,6.78", Action(CITY, "5,6.78")),
    ("città:0;register=agente,josé".encode(), Register(Header("città", 0), "agente", "josé")),
]
SERVER_GOLDEN = [
    (b"city:7;agent0=open,citizen,cpu,ready", LobbyInfo(CITY, (Slot("agent0", True, "citizen", "cpu", True),))),
    (
        b"city:7;agent0=close,citizen,patrick,ready;agent1=open,zombie,,not_ready",
        LobbyInfo(CITY, (Slot("agent0", False, "citizen", "patrick", True), Slot("agent1", True, "zombie", "", False))),
    ),
    (b"city:7;registered=agent0", Registered(CITY, "agent0")),
    (b"city:7;message=Simulation will start...", Message(CITY, "Simulation will start...")),
    (b"city:7;message=a;b=c:d,e", Message(CITY, "a;b=c:d,e")),
    (b"city:7;message=", Message(CITY, "")),
    (b"city:7;start=port:32323", Start(CITY, 32323)),
    (
        b"city:7:1590853116323:0;obs=45;reward=0;done=false",
        Step(CITY, 1590853116323, 0, "45", "0", False),
    ),
    (
        b"city:7:1590853116323:12;obs=x:0.54,y:0.95;reward=-1.5;done=true;extra=did_jump:true,jump_length:6.84",
        Step(CITY, 1590853116323, 12, "x:0.54,y:0.95", "-1.5", True, "did_jump:true,jump_length:6.84"),
    ),
]


@pytest.mark.parametrize(("datagram", "message"), CLIENT_GOLDEN)
def test_a_clients_golden_datagram_is_read_and_written_back(datagram, message):
    # P-1: each message is one datagram; P-14, P-20: UTF-8.
    assert parse_client(datagram) == message
    assert format_message(message) == datagram


@pytest.mark.parametrize(("datagram", "message"), SERVER_GOLDEN)
def test_a_servers_golden_datagram_is_read_and_written_back(datagram, message):
    assert parse_server(datagram) == message
    assert format_message(message) == datagram


def test_the_last_semicolon_of_a_lobby_may_stand_or_be_omitted():
    # P-24
    with_one, without = b"city:7;agent0=open,citizen,cpu,ready;", b"city:7;agent0=open,citizen,cpu,ready"
    assert parse_server(with_one) == parse_server(without)


def test_extra_is_optional_and_unknown_particles_after_done_are_ignored():
    # P-25
    base = b"city:7:1:0;obs=45;reward=0;done=false"
    assert parse_server(base).extra is None
    assert parse_server(base + b";extra=a:1").extra == "a:1"
    assert parse_server(base + b";later=1;extra=a:1;more").extra == "a:1"


BAD_CLIENT = [
    b"",
    b"city",
    b"city:7",
    b"city:7;",
    b"city;lobby",
    b":7;lobby",
    b"city:;lobby",
    b"city:-1;lobby",
    b"city:+1;lobby",
    b"city:07;lobby",
    b"city:1.0;lobby",
    b"city:9999999999999999999;lobby",
    "city:\u0667;lobby".encode(),
    b"city:7;lobby;",
    b"city:7;Lobby",
    b"city:7;register=agent0",
    b"city:7;register=,tag",
    b"city:7;register=agent0,a,b",
    b"city:7;register=agent0,x=y",
    b"city:7;register=agent0,x:y",
    b"city:7;register=agent0,x;y",
    b"city:7;register=agent0,x\ny",
    b"city:7;register=agent0,x\x1b[2J",
    b"city:7;register=ready,tag",
    b"city:7;register=agent0," + b"t" * 65,
    b"city:7;ready=agent0",
    b"city:7;ready=agent0,True",
    b"city:7;ready=agent0,1",
    b"city:7;ready=agent0,true ",
    b"city:7;action=",
    b"city:7;action=a:b",
    b"city:7;action=a;b",
    b"city:7;action=a=b",
    b"city:7;jump=1",
    b"city:7;agent0=open,citizen,cpu,ready",
    b"city:7;action=\xff\xfe",
    b"city:7;action=\xc0\x80",
    b"city:7;action=\xed\xa0\x80",
    b"n" * 65 + b":7;lobby",
]


@pytest.mark.parametrize("datagram", BAD_CLIENT)
def test_a_clients_datagram_outside_of_the_grammar_is_refused(datagram):
    with pytest.raises(PacketError):
        parse_client(datagram)


BAD_SERVER = [
    b"",
    b"city:7;",
    b"city:7;;",
    b"city:7;agent0=open,citizen,cpu",
    b"city:7;agent0=opened,citizen,cpu,ready",
    b"city:7;agent0=open,citizen,cpu,maybe",
    b"city:7;agent0=open,citizen,cpu,ready;;",
    b"city:7;agent0=open,citizen,a,ready;agent0=open,citizen,b,ready",
    b"city:7;action=open,citizen,cpu,ready",
    b"city:7;registered=",
    b"city:7;start=32323",
    b"city:7;start=port:0",
    b"city:7;start=port:65536",
    b"city:7;start=port:-1",
    b"city:7:1;obs=1;reward=1;done=true",
    b"city:7:1:2:3;obs=1;reward=1;done=true",
    b"city:7:x:2;obs=1;reward=1;done=true",
    b"city:7:1:-2;obs=1;reward=1;done=true",
    b"city:7:1:9223372036854775808;obs=1;reward=1;done=true",  # no int64
    b"city:7:1:2;reward=1;obs=1;done=true",
    b"city:7:1:2;obs=1;reward=1",
    b"city:7:1:2;obs=;reward=1;done=true",
    b"city:7:1:2;obs=1;reward=1;done=yes",
    b"city:7:1:2;obs=a=b;reward=1;done=true",
    b"city:7:1:2;obs=1;reward=a=b;done=true",
    b"city:7:1:2;obs=1;reward=1;done=true;extra=a=b",
    b"city:7:1:2;obs=1;reward=1;done=true;extra=a;extra=b",
]


@pytest.mark.parametrize("datagram", BAD_SERVER)
def test_a_servers_datagram_outside_of_the_grammar_is_refused(datagram):
    with pytest.raises(PacketError):
        parse_server(datagram)


@pytest.mark.parametrize("head", ["0:", ":0"])
def test_a_servers_datagram_of_colons_is_read_in_the_time_of_its_length(head):
    # By the square of its length this would take hours.
    with pytest.raises(PacketError):
        parse_server(head.encode() * 500_000 + b";obs=1;reward=1;done=true")


@pytest.mark.parametrize(("datagram", "message"), CLIENT_GOLDEN + SERVER_GOLDEN)
def test_a_truncated_datagram_is_refused_or_is_another_whole_message(datagram, message):
    parse = parse_client if (datagram, message) in CLIENT_GOLDEN else parse_server
    for size in range(len(datagram)):
        try:
            cut = parse(datagram[:size])
        except PacketError:
            continue
        assert cut != message or datagram[:size] + b";" == datagram


@pytest.mark.parametrize("text", ["a:b", "a;b", "a=b"])
def test_an_action_with_a_banned_character_is_never_sent(text):
    # P-2
    with pytest.raises(PacketError):
        format_message(Action(CITY, text))


@pytest.mark.parametrize("text", ["a:b", "a;b", "a,b", "a=b", "a\nb"])
def test_a_kind_with_a_banned_character_is_neither_sent_nor_read(text):
    # P-3
    with pytest.raises(PacketError):
        format_message(LobbyInfo(CITY, (Slot("agent0", True, text, "", False),)))
    with pytest.raises(PacketError):
        parse_server(f"city:7;agent0=open,{text},cpu,ready".encode())


@pytest.mark.parametrize("text", ["a;b", "a=b"])
def test_observation_reward_and_extra_with_a_banned_character_are_never_sent(text):
    # P-4, P-5, P-6
    for fields in ((text, "0", None), ("1", text, None), ("1", "0", text)):
        observation, reward, extra = fields
        with pytest.raises(PacketError):
            format_message(Step(CITY, 1, 1, observation, reward, False, extra))


@pytest.mark.parametrize("key", sorted(RESERVED_KEYS))
def test_a_word_of_the_grammar_is_no_key(key):
    with pytest.raises(PacketError, match="none of"):
        check_label(key, "key")


def test_a_tag_cannot_forge_a_slot():
    forged = "x,ready;agent1=close,citizen,mallory"
    with pytest.raises(PacketError):
        format_message(LobbyInfo(CITY, (Slot("agent0", False, "citizen", forged, False),)))
    with pytest.raises(PacketError):
        parse_client(f"city:7;register=agent0,{forged}".encode())


@pytest.mark.parametrize(("kind", "most"), [(Message, MAX_MESSAGE), (Action, MAX_CLIENT_MESSAGE)])
def test_nothing_longer_than_a_datagram_is_written(kind, most):
    """P-26: with a key, whose additions to a client's message are the longer ones."""
    room = most - len(format_message(kind(CITY, "m"))) + 1
    assert len(format_message(kind(CITY, "m" * room))) == most
    with pytest.raises(PacketError, match=f"at most {most} bytes, got {most + 1}"):
        format_message(kind(CITY, "m" * (room + 1)))


def test_an_error_says_what_was_expected_and_what_came_and_can_be_pickled():
    with pytest.raises(PacketError) as caught:
        parse_client(b"city:7;ready=agent0,yes")
    assert str(caught.value) == "expected true or false, got 'yes'"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


label = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=":;,=\u2028\u2029"), min_size=1, max_size=16
)
key = label.filter(lambda text: text not in RESERVED_KEYS)
headers = st.builds(Header, label, st.integers(0, 10**18 - 1))
free = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=";="), min_size=1, max_size=60)
slots = st.lists(
    st.builds(Slot, key, st.booleans(), label | st.just(""), label | st.just(""), st.booleans()),
    min_size=1,
    max_size=5,
    unique_by=lambda slot: slot.key,
)
client_messages = st.one_of(
    st.builds(LobbyRequest, headers),
    st.builds(Register, headers, key, label | st.just("")),
    st.builds(ReadyMessage, headers, key, st.booleans()),
    st.builds(Action, headers, free.filter(lambda text: ":" not in text)),
)
server_messages = st.one_of(
    st.builds(LobbyInfo, headers, slots.map(tuple)),
    st.builds(Registered, headers, key),
    st.builds(Message, headers, st.text(st.characters(exclude_categories=["Cs"]), max_size=60)),
    st.builds(Start, headers, st.integers(1, 65535)),
    st.builds(
        Step,
        headers,
        st.integers(0, 10**18 - 1),
        st.integers(0, 10**18 - 1),
        free,
        free,
        st.booleans(),
        free | st.none(),
    ),
)


@given(client_messages)
def test_what_a_client_writes_reads_back_as_it_was(message):
    assert parse_client(format_message(message)) == message


@given(server_messages)
def test_what_a_server_writes_reads_back_as_it_was(message):
    assert parse_server(format_message(message)) == message


@given(st.binary(max_size=200) | st.text("cityagent01:;,=truefalsobdwlyp.", max_size=60).map(str.encode))
def test_random_bytes_are_refused_or_read_back_the_same(datagram):
    for parse in (parse_client, parse_server):
        try:
            message = parse(datagram)
        except PacketError:
            continue
        assert parse(format_message(message)) == message
