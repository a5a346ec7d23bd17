"""`bridge lobby perlert://…`: the lobby and the game in a terminal, for people; works through a plain pipe, too."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gymnasium import spaces

from bridge.errors import BridgeError, PacketError
from bridge.perlert import player
from bridge.perlert.address import parse_perlert_address
from bridge.perlert.client import Seat
from bridge.perlert.codec import Space, TextCodec, default_action
from bridge.perlert.packet import Action, check_label, format_message
from bridge.perlert.profile import split_tag

__all__ = ["add_lobby_parser", "clean", "key_actions", "run", "run_lobby"]

HELP = """commands:
  slots                 show the lobby
  register KEY [TAG]    take a slot
  watch                 take a spectator's slot
  ready, unready        be ready for the start, or no longer
  action TEXT           do this from now on, e.g. action 1
  quit
during a run: the arrow keys or digits (in a pipe: a line with the action's text)"""

_ARROWS = {"\x1b[D": "left", "\x1b[C": "right", "\x1b[A": "up", "\x1b[B": "down"}
_ARROWS |= {key.replace("[", "O"): name for key, name in _ARROWS.items()}
_LETTERS = {"a": "left", "d": "right", "w": "up", "s": "down"}


def clean(text: str) -> str:
    """Return a peer's text without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def key_actions(space: Space | None) -> dict[str, str]:
    """Return what each key means: digits and arrows for a Discrete space, nothing for others (type the action)."""
    if not isinstance(space, spaces.Discrete):
        return {}
    start, count = int(space.start), int(space.n)
    actions = {str(digit): str(start + digit) for digit in range(min(count, 10))}
    order = {2: ("left", "right"), 3: ("left", "down", "right")}.get(count, ("left", "down", "right", "up"))
    named = {name: str(start + number) for number, name in enumerate(order) if number < count}
    for key, name in {**_ARROWS, **_LETTERS}.items():
        if name in named:
            actions[key] = named[name]
    return actions


class _Input:
    """Lines or, in a terminal while a run is on, single keys."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
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
        """Take single keys in a terminal; put it back whatever happens."""
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
    def __init__(
        self, seat: Seat, source: _Input, target: IO[str], *, once: bool, patience: float, answer_within: float
    ) -> None:
        self.seat, self.me, self.input, self.output = seat, seat.player, source, target
        self.once, self.patience, self.answer_within = once, patience, answer_within
        self.quit = False
        self.code = 0
        self.steps = 0
        self.playing = False
        self.typed = ""
        self.defaulted = False
        self.status = False
        self.keys = contextlib.ExitStack()
        """Holds the terminal's mode for single keys while a run is on."""
        self._table = ""

    def say(self, text: str) -> None:
        if self.status:
            self.output.write("\n")
            self.status = False
        self.output.write(text + "\n")
        self.output.flush()

    def show_slots(self, *, again: bool = False) -> None:
        rows = []
        for slot in self.me.slots.values():
            mine = "*" if slot.key == self.me.key and not slot.open else " "
            who = split_tag(slot.tag)[0] or "-"
            state = "open" if slot.open else "taken"
            ready = "ready" if slot.ready else "not ready"
            rows.append(f" {mine} {clean(slot.key):12} {clean(slot.kind):12} {state:6} {ready:10} {clean(who)}")
        table = "\n".join([f"lobby {self.me.header}", *rows])
        if again or table != self._table:
            self._table = table
            self.say(table)

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        now = time.monotonic()
        if word == "register":
            key, _, tag = rest.partition(" ")
            try:
                check_label(key, "key")
                check_label(f"{tag}+b1.{'0' * 12}", "tag")
            except PacketError as error:
                self.say(f"cannot register: {error}")
                return
            if key not in self.me.slots:
                self.say(f"there is no slot {key!r}; the slots are {', '.join(map(clean, self.me.slots))}")
                return
            if tag:
                self.me.tag = tag
            self.seat.port.send(self.me.set_agent(key, now))
        elif word == "watch":
            self.watch()
        elif word in ("ready", "unready"):
            if self.me.key is None:
                self.say("take a slot first: register KEY")
            self.seat.port.send(self.me.set_ready(word == "ready", now))
        elif word == "slots":
            self.show_slots(again=True)
        elif word in ("quit", "q", "exit"):
            self.quit = True
        elif word == "action":
            self.act(rest)
        elif self.playing and line:
            self.act(line)
        elif line:
            self.say(HELP)

    def watch(self) -> None:
        free = [slot.key for slot in self.me.slots.values() if slot.kind == "spectator" and slot.open]
        if not free:
            self.say("no spectator's slot is open; the server offers them by spectators=N")
            return
        now = time.monotonic()
        self.seat.port.send(self.me.set_agent(free[0], now))
        self.seat.port.send(self.me.set_ready(True, now))

    def act(self, text: str) -> None:
        try:
            if self.space is not None:
                TextCodec(self.space, named=False, decimals=None).decode(text)
            format_message(Action(self.me.header, text))
        except PacketError as error:
            self.say(f"not an action: {error}")
            return
        self.seat.port.send(self.me.act(text, time.monotonic()))

    @property
    def space(self) -> Space | None:
        return self.me.offer.action_space if self.me.offer else None

    def key_pressed(self, text: str) -> None:
        actions = key_actions(self.space)
        while text:
            for key in sorted(actions, key=len, reverse=True):
                if text.startswith(key):
                    self.act(actions[key])
                    text = text[len(key) :]
                    break
            else:
                character, text = text[0], text[1:]
                if character in "\r\n":
                    line, self.typed = self.typed, ""
                    self.command(line)
                elif character == "q" and not self.typed:
                    self.quit = True
                elif character == "\x7f":
                    self.typed = self.typed[:-1]
                elif character.isprintable():
                    self.typed += character

    def events(self) -> None:
        while self.me.events:
            event = self.me.events.popleft()
            if isinstance(event, player.LobbyChanged):
                self.show_slots()
            elif isinstance(event, player.Said):
                self.say(f"server: {clean(event.text)}")
            elif isinstance(event, player.RunStarted):
                if not self.playing:
                    self.keys.enter_context(self.input.keys())
                self.playing, self.steps = True, 0
                actions = key_actions(self.space)
                how = "arrow keys or digits" if actions else "type an action and Enter"
                self.say(f"the run starts on port {event.port}; {how}, q to quit")
            else:
                self.show_step(event)

    def show_step(self, step: player.Stepped) -> None:
        self.steps += 1
        observation = clean(step.observation)
        text = f"step {step.step}  reward {step.reward:f}  return {step.ret:f}  obs {observation}"
        if self.input.tty:
            self.output.write("\r\x1b[K" + text[:150])
            self.output.flush()
            self.status = True
        else:
            self.say(text)
        if step.done:
            self.playing = False
            self.keys.close()
            loss = self.me.stats.lost
            note = f", {loss} steps lost" if loss else ""
            self.say(f"the run is over: return {step.ret:f} after step {step.step}{note}")
            if self.once or self.input.ended:
                self.quit = True
            else:
                self.seat.port.send(self.me.again(time.monotonic(), ready=False))
                self.say("`ready` for the next run, `quit` to leave")

    def loop(self) -> None:
        begun = time.monotonic()
        heard = False
        ended_at: float | None = None
        while not self.quit:
            self.seat.pump()
            if self.space is not None and not self.defaulted:
                self.defaulted = True
                codec = TextCodec(self.space, named=False, decimals=None)
                self.me.set_default(codec.encode(default_action(self.space)))
            self.events()
            now = time.monotonic()
            heard = heard or bool(self.me.slots)
            if not heard and now > begun + self.answer_within:
                self.say(
                    f"no lobby {self.me.header} answered at {self.seat.address.host}:{self.seat.address.port}: is the "
                    "server running, and is that the lobby's name and number? A server does not answer for others"
                )
                self.code = 1
                return
            wanted = self.me.agent
            if heard and self.me.key is None and wanted is not None and wanted not in self.me.slots:
                self.say(clean(self.me.waits_for()))
                self.code = 1
                return
            if self.input.ended and not self.playing:
                ended_at = ended_at or now
                if self.me.key is None or now > ended_at + self.patience:
                    if self.me.key is not None:
                        self.say(f"gave up: {self.me.waits_for()}")
                        self.code = 1
                    return
            sources: list[Any] = [self.seat.port]
            if not self.input.ended and heard:
                sources.append(self.input.fileno)
            timeout = min(max(self.me.wake() - now, 0.0), 0.5)
            readable, _, _ = select.select(sources, [], [], timeout)
            if self.input.fileno in readable:
                self.read_input()

    def read_input(self) -> None:
        if self.playing and self.input.tty:
            self.key_pressed(self.input.read())
        else:
            for line in self.input.lines():
                self.command(line)


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
    """Show the lobby and play, with commands from `source` and everything seen to `target`.

    Args:
        url: `perlert://HOST:PORT/NAME:NUMBER`.
        agent: The slot to take at once; None: the URL's, or none until `register`.
        tag: What to be called; None: the user's name.
        key: The pre-shared key.
        ready: Be ready as soon as the slot is had.
        spectate: Take a spectator's slot.
        once: Leave after the first run.
        patience: Seconds that a run may take to start after the input ended.
        answer_within: Seconds that the lobby may take to answer for the first time.
        source: A file with a descriptor; None: standard input.
        target: Where to write; None: standard output.

    Returns:
        An exit status: 0, or 1 when the lobby did not answer or the run did not start.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: The host has no address.
    """
    address = parse_perlert_address(url)
    agent = agent if agent is not None else address.agent
    seat = Seat(
        address,
        agent=agent,
        tag=tag if tag is not None else (address.tag or _user()),
        key=key,
        ready=ready,
        choose=False,
    )
    source = source or sys.stdin
    terminal = _Terminal(
        seat, _Input(source), target or sys.stdout, once=once, patience=patience, answer_within=answer_within
    )
    try:
        if spectate:
            begun = time.monotonic()
            while not any(slot.kind == "spectator" for slot in seat.player.slots.values()):
                if time.monotonic() > begun + answer_within:
                    terminal.say("no spectator's slot was offered")
                    return 1
                seat.wait(begun + answer_within)
            terminal.watch()
        with terminal.keys:
            terminal.loop()
    except KeyboardInterrupt:
        terminal.say("")
    finally:
        seat.close()
    return terminal.code


def _user() -> str:
    import getpass

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "player"
    return "".join(character for character in name if character.isalnum() or character in "_-")[:32] or "player"


def add_lobby_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `lobby` sub-command to `bridge`; its arguments go to `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lobby",
        description="Join a PERLERT lobby: who is in which slot, register, ready, messages, then play by keyboard.",
        epilog="examples:\n  bridge lobby perlert://localhost:32322/cartpole:0\n"
        "  bridge lobby perlert://localhost:32322/cartpole:0 --agent agent0 --ready\n"
        "  bridge lobby perlert://localhost:32322/cartpole:0 --watch\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="perlert://HOST:PORT/NAME:NUMBER")
    parser.add_argument("--agent", metavar="KEY", help="take this slot at once")
    parser.add_argument("--tag", help="what to be called; default: the user's name")
    parser.add_argument("--ready", action="store_true", help="be ready as soon as the slot is had")
    parser.add_argument("--watch", action="store_true", help="take a spectator's slot")
    parser.add_argument("--once", action="store_true", help="leave after the first run")
    parser.add_argument("--key-file", type=Path, metavar="PATH", help="a file with the pre-shared key")
    parser.set_defaults(run=run, exit_codes={BridgeError: 2, OSError: 2})
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the `lobby` sub-command; return its exit status."""
    key = args.key_file.read_bytes().strip() if args.key_file is not None else None
    return run_lobby(
        args.url,
        agent=args.agent,
        tag=args.tag,
        key=key,
        ready=args.ready,
        spectate=args.watch,
        once=args.once,
    )
