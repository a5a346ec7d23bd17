"""`gymnasium-bridge lobby perlert://…`: a lobby and its game in a terminal, or through a plain pipe."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import secrets
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gymnasium import spaces

from bridge.cli.program import FAILED, OK, clean
from bridge.cli.running import read_key
from bridge.core.logs import counted
from bridge.core.worlds.group import neutral_action
from bridge.errors import PacketError, SettingError
from bridge.perlert import player
from bridge.perlert.address import parse_perlert_address
from bridge.perlert.client import PerlertClient, check_names
from bridge.perlert.player_run import Stepped
from bridge.perlert.protocol.codec import Space, TextCodec
from bridge.perlert.protocol.packet import Message, Start, check_label
from bridge.perlert.protocol.profile import parse_tag

__all__ = ["key_actions", "key_legend", "register", "run", "run_lobby"]

HELP = """commands:
  slots                 show the lobby
  register KEY [NAME]   take a slot, as NAME
  watch                 take a spectator's slot
  ready, unready        be ready for the start, or no longer; after a run you are ready for the next one by yourself
  action TEXT           do this from now on, e.g. action 1
  help, quit
during a run: the arrow keys, wasd or digits (in a pipe: a line with the action's text)"""

_ARROWS = {"\x1b[D": "left", "\x1b[C": "right", "\x1b[A": "up", "\x1b[B": "down"}
_ARROWS |= {key.replace("[", "O"): name for key, name in _ARROWS.items()}
_LETTERS = {"a": "left", "d": "right", "w": "up", "s": "down"}


def _arrows(space: spaces.Discrete) -> dict[str, str]:
    """Return the action of each arrow, by the arrow's name."""
    count = int(space.n)
    order = {2: ("left", "right"), 3: ("left", "down", "right")}.get(count, ("left", "down", "right", "up"))
    return {name: str(int(space.start) + number) for number, name in enumerate(order) if number < count}


def key_actions(space: Space | None) -> dict[str, str]:
    """Return the action of each key: digits and arrows for a Discrete space; for other spaces actions are typed."""
    if not isinstance(space, spaces.Discrete):
        return {}
    actions = {str(digit): str(int(space.start) + digit) for digit in range(min(int(space.n), 10))}
    named = _arrows(space)
    return actions | {key: named[name] for key, name in {**_ARROWS, **_LETTERS}.items() if name in named}


def key_legend(space: Space | None) -> str:
    """Return a line that explains the keys."""
    if not isinstance(space, spaces.Discrete):
        return "type an action and Enter"
    signs = {"left": "←/a", "right": "→/d", "up": "↑/w", "down": "↓/s"}
    arrows = "  ".join(f"{signs[name]}: {action}" for name, action in _arrows(space).items())
    first, last = int(space.start), int(space.start) + int(space.n) - 1
    digits = f"0-{min(last - first, 9)}: actions {first} to {min(last, first + 9)}"
    return f"keys  {arrows}  {digits}  q: quit"


class _Input:
    """Reads lines or, in a terminal during a run, single keys."""

    def __init__(self, stream: IO[str]) -> None:
        self.fileno = stream.fileno()
        self.tty = os.isatty(self.fileno)
        self.ended = False
        self._rest = ""

    def read(self) -> str:
        data = os.read(self.fileno, 4096)
        if not data:
            self.ended = True
        return data.decode("utf-8", "replace")

    def lines(self) -> Iterator[str]:
        self._rest += self.read()
        while "\n" in self._rest:
            line, _, self._rest = self._rest.partition("\n")
            yield line.strip()
        if self.ended and self._rest.strip():
            line, self._rest = self._rest.strip(), ""
            yield line

    @contextlib.contextmanager
    def keys(self) -> Iterator[None]:
        """Read single keys in a terminal, and restore its mode at the end."""
        if not self.tty:
            yield
            return
        import termios
        import tty

        before = termios.tcgetattr(self.fileno)
        try:
            tty.setcbreak(self.fileno)
            yield
        finally:
            termios.tcsetattr(self.fileno, termios.TCSADRAIN, before)


class _Terminal:
    """The screen and the keyboard of a person in a lobby."""

    def __init__(self, client: PerlertClient, source: _Input, target: IO[str], *, once: bool) -> None:
        self.client, self.me, self.input, self.output = client, client.player, source, target
        self.once = once
        self.quit = False
        self.playing = False
        self.keys = contextlib.ExitStack()
        """Holds the terminal's mode for single keys during a run."""
        self.mine = ""
        """The slot that was announced as ours."""
        self._typed = ""
        self._defaulted = False
        self._status = False
        self._table = ""
        self._refusal = ""
        self._wanted = ""

    def say(self, text: str) -> None:
        if self._status:
            self.output.write("\n")
            self._status = False
        self.output.write(text + "\n")
        self.output.flush()

    def show_slots(self, *, again: bool = False) -> None:
        rows = []
        for slot in self.me.slots.values():
            mine = "*" if slot.key == self.mine and not slot.open else " "
            who = parse_tag(slot.tag).name or "-"
            state = "open" if slot.open else "taken"
            ready = "ready" if slot.ready else "not ready"
            rows.append(f" {mine} {clean(slot.key):12} {clean(slot.kind):12} {state:6} {ready:10} {clean(who)}")
        table = "\n".join([f"lobby {self.me.header}", *rows])
        if again or table != self._table:
            self._table = table
            self.say(table)

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        now = time.monotonic()
        if word == "register":
            self.take(*rest.split(maxsplit=1)[:2])
        elif word == "watch":
            self.watch()
        elif word in ("ready", "unready"):
            if self.me.key is None:
                self.say("take a slot first: register KEY")
            self.client.port.send(self.me.set_ready(word == "ready", now))
        elif word == "slots":
            self.show_slots(again=True)
        elif word == "help":
            self.say(HELP)
        elif word in ("quit", "q", "exit"):
            self.quit = True
        elif word == "action":
            self.act(rest.strip())
        elif self.playing and line:
            self.act(line)
        elif line:
            self.say(f"unknown command {clean(word)!r}; `help` lists them")

    def take(self, key: str = "", name: str = "") -> None:
        """Ask for a slot, or say why it cannot be taken."""
        try:
            check_label(key, "key")
            check_names(name)
        except (PacketError, SettingError) as error:
            self.say(f"cannot register: {error}")
            return
        slot = self.me.slots.get(key)
        if slot is None:
            self.say(f"there is no slot {key!r}; the slots are {', '.join(map(clean, self.me.slots))}")
            return
        if not slot.open and key != self.mine:
            self.say(f"{key} is taken by {clean(parse_tag(slot.tag).name) or 'somebody'}; choose an open slot")
            return
        if name:
            self.me.tag = name
        self._wanted = key
        self.client.port.send(self.me.set_agent(key, time.monotonic()))

    def watch(self) -> None:
        free = [slot.key for slot in self.me.slots.values() if slot.kind == "spectator" and slot.open]
        if not free:
            self.say("no spectator's slot is open; the server offers them by --spectators N")
            return
        self.take(free[0])
        self.client.port.send(self.me.set_ready(True, time.monotonic()))

    def act(self, text: str) -> None:
        try:
            if self.space is not None:
                TextCodec(self.space, named=False, decimals=None).decode(text)
            self.client.port.send(self.me.act(text, time.monotonic()))
        except PacketError as error:
            self.say(f"not an action: {error}")

    @property
    def space(self) -> Space | None:
        return self.me.offer.action_space if self.me.offer else None

    def key_pressed(self, text: str) -> None:
        actions = key_actions(self.space)
        while text:
            key = next((key for key in sorted(actions, key=len, reverse=True) if text.startswith(key)), "")
            if key:
                self.act(actions[key])
                text = text[len(key) :]
                continue
            character, text = text[0], text[1:]
            if character in "\r\n":
                line, self._typed = self._typed, ""
                self.command(line)
            elif character == "q" and not self._typed:
                self.quit = True
            elif character == "\x7f":
                self._typed = self._typed[:-1]
            elif character.isprintable():
                self._typed += character

    # Received messages

    def look(self) -> None:
        """Show new events."""
        if self.space is not None and not self._defaulted:
            self._defaulted = True
            codec = TextCodec(self.space, named=False, decimals=None)
            self.me.action = codec.encode(neutral_action(self.space))
        self.see_slot()
        if self.me.slots:
            self.show_slots()
        while self.me.events:
            event = self.me.events.popleft()
            if isinstance(event, Message):
                if self.me.slots or event.text != self._refusal:  # do not repeat the same refusal for each attempt
                    self.say(f"server: {clean(event.text)}")
                self._refusal = event.text
            elif isinstance(event, Start):
                if not self.playing:
                    self.keys.enter_context(self.input.keys())
                self.playing = True
                self.say(f"the run starts on port {event.port}")
                self.say(key_legend(self.space))
            else:
                self.show_step(event)

    def see_slot(self) -> None:
        """Announce our slot, or that somebody else has taken it."""
        if self.me.key is not None and self.me.registered and self.mine != self.me.key:
            self.mine = self._wanted = self.me.key
            self.say(f"you are {clean(self.me.key)} ({clean(self.me.tag)})")
            self._table = ""
        wanted = self.me.slots.get(self._wanted)
        if wanted is not None and not wanted.open and self.me.state is player.PlayerState.ASKING:
            self.say(f"{clean(wanted.key)} is taken by {clean(parse_tag(wanted.tag).name) or 'somebody'}")
            self._wanted = self.mine = ""

    def show_step(self, step: Stepped) -> None:
        text = f"step {step.step}  reward {step.reward:f}  return {step.ret:f}  obs {clean(step.observation)}"
        if self.input.tty:
            self.output.write("\r\x1b[K" + text[:150])
            self.output.flush()
            self._status = True
        else:
            self.say(text)
        if step.done:
            self.playing = False
            self.keys.close()
            note = f", {counted(self.me.stats.lost, 'step')} lost" if self.me.stats.lost else ""
            self.say(f"the run is over: return {step.ret:f} after step {step.step}{note}")
            if self.once or self.input.ended:
                self.quit = True
            else:
                self.client.port.send(self.me.set_ready(True, time.monotonic()))
                self.say("you are ready for the next run; `unready` to wait, `quit` to leave")

    def wait(self, until: float) -> None:
        """Wait for the network, the keyboard or a time, and execute typed commands."""
        sources: list[Any] = [self.client.port]
        if not self.input.ended and self.me.slots:
            sources.append(self.input.fileno)
        readable, _, _ = select.select(sources, [], [], max(0.0, min(self.me.wake(), until) - time.monotonic()))
        if self.input.fileno in readable:
            if self.playing and self.input.tty:
                self.key_pressed(self.input.read())
            else:
                for line in self.input.lines():
                    self.command(line)
        self.client.pump()
        self.look()


def _loop(terminal: _Terminal, agent: str | None, spectate: bool, patience: float, answer_within: float) -> int:
    """Play until the user leaves; return an exit status."""
    me, begun, ended_at = terminal.me, time.monotonic(), None
    terminal.client.pump()
    asked = not spectate and agent is None
    while not terminal.quit:
        now = time.monotonic()
        if not me.slots and now > begun + answer_within:
            said = f"; the server says: {clean(me.said)}" if me.said else "; is the server running?"
            terminal.say(f"no PERLERT lobby answered at {terminal.client.address.url}{said}")
            return FAILED
        if not asked and me.slots and (spectate or agent in me.slots or now > begun + 2.0):
            asked = True
            if spectate and not any(slot.kind == "spectator" for slot in me.slots.values()):
                terminal.say("no spectator's slot was offered; the server offers them by --spectators N")
                return FAILED
            if agent is not None and agent not in me.slots:
                terminal.take(agent)
                return FAILED
            terminal.watch() if spectate else terminal.take(str(agent))
        if terminal.input.ended and asked and not terminal.playing:
            ended_at = ended_at or now
            if me.key is None:
                return OK
            if now > ended_at + patience:
                terminal.say(f"gave up: {clean(me.waits_for())}")
                return FAILED
        terminal.wait(now + 0.5)
    return OK


def run_lobby(
    url: str,
    *,
    agent: str | None = None,
    tag: str | None = None,
    key: bytes | str | None = None,
    ready: bool = False,
    spectate: bool = False,
    once: bool = False,
    patience: float = 60.0,
    answer_within: float = 10.0,
    source: IO[str] | None = None,
    target: IO[str] | None = None,
) -> int:
    """Show the lobby and play, with commands from `source` and output to `target`.

    Args:
        url: `perlert://HOST:PORT/NAME:NUMBER`.
        agent: The slot to take at once; None: the URL's, or none until `register`.
        tag: The name to use; None: the user's name and a few random digits.
        key: The pre-shared key.
        ready: Announce that this player is ready, once it has a slot.
        spectate: Take a spectator's slot.
        once: Leave after the first run.
        patience: Seconds that a run may take to start after the input ended.
        answer_within: Seconds that the lobby may take to answer for the first time.
        source: A file with a descriptor; None: standard input.
        target: The output; None: standard output.

    Returns:
        An exit status: 0, or 1 when the lobby did not answer, a slot does not exist or the run did not start.

    Raises:
        AddressError: The URL is malformed.
        ConnectError: The host has no address.
        SettingError: This platform cannot wait for a terminal and a socket at once.
    """
    if os.name != "posix":
        raise SettingError(
            "gymnasium-bridge lobby needs Linux or macOS: it waits for the terminal and the network at once. "
            "Play by a program: bridge.perlert.PerlertEnv"
        )
    address = parse_perlert_address(url)
    agent = agent if agent is not None else address.agent
    tag = tag if tag is not None else (address.tag or _user())
    # Without an agent at first: a slot is taken once the slots are known.
    client = PerlertClient(address, agent="", tag=tag, key=key, ready=ready, is_person=True)
    terminal = _Terminal(client, _Input(source or sys.stdin), target or sys.stdout, once=once)
    try:
        with terminal.keys:
            return _loop(terminal, agent, spectate, patience, answer_within)
    except KeyboardInterrupt:
        terminal.say("")
        return OK
    finally:
        client.close()


def _user() -> str:
    """Return a name that differs for each terminal of a user."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        name = "player"
    name = "".join(
        character for character in name if character.isascii() and (character.isalnum() or character in "_-")
    )
    return f"{name[:16] or 'player'}-{secrets.token_hex(2)}"


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "lobby",
        help="join a PERLERT lobby and play in the terminal",
        description="Join a PERLERT lobby: who is in which slot, register, ready, messages, then play by keyboard.",
        epilog="examples:\n  gymnasium-bridge lobby perlert://localhost:32322/cartpole:0\n"
        "  gymnasium-bridge lobby perlert://localhost:32322/cartpole:0 --agent agent0 --ready\n"
        "  gymnasium-bridge lobby perlert://localhost:32322/cartpole:0 --watch\n",
    )
    parser.add_argument("url", metavar="URL", help="perlert://HOST:PORT/NAME:NUMBER")
    parser.add_argument("--agent", metavar="KEY", help="take this slot at once")
    parser.add_argument("--tag", metavar="NAME", help="your name (default: the user's name and some digits)")
    parser.add_argument("--ready", action="store_true", help="say that you are ready, once you have a slot")
    parser.add_argument("--watch", action="store_true", help="take a spectator's slot")
    parser.add_argument("--once", action="store_true", help="leave after the first run")
    parser.add_argument("--key-file", type=Path, metavar="PATH", help="a file with the pre-shared key")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command."""
    return run_lobby(
        arguments.url,
        agent=arguments.agent,
        tag=arguments.tag,
        key=read_key(arguments.key_file),
        ready=arguments.ready,
        spectate=arguments.watch,
        once=arguments.once,
    )
