"""`gymnasium-bridge play`: play a remote environment with the keyboard, with diagnostics on the screen."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from bridge.cli.program import OK, add_wait_option, positive, positive_int
from bridge.core.client.envs.env import RemoteEnv
from bridge.core.extras import feature, needed
from bridge.core.transport.credentials import add_credential_options, credential_keywords
from bridge.errors import RefusedError, SettingError

__all__ = ["Keyboard", "add_play_parser", "describe", "draw", "read_keys", "register", "run"]

_EPILOG = """Keys of Discrete actions: the digits 0 to 9, then letters for actions without names; the arrows if there
are at most four actions, or if the environment names its actions (Atari); and --keys. Box actions: left and right
change the first number, down and up the second. In lock-step, an environment in which no action does nothing waits for
a key. Backspace resets it, Escape quits.

examples:
  gymnasium-bridge play grpc://localhost:50051/CartPole-v1
  gymnasium-bridge play grpc://localhost:50051/ALE/Pong-v5
  gymnasium-bridge play grpc://localhost:50051 --keys a=0 d=1
  gymnasium-bridge play "grpc://localhost:50051?world=" --role spectator
"""

_NO_DISPLAY = (
    "gymnasium-bridge play opens a window, and there is no display here; run it where there is one, or serve with "
    "--web and play in a browser"
)
# The height of a line of text, and the margin around the text, in pixels.
_LINE, _MARGIN = 20, 6


def add_play_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "play",
        description="Play a remote environment with the keyboard, at its frame rate.",
        epilog=_EPILOG,
    )
    parser.add_argument("url", metavar="URL", help="URL of the environment")
    parser.add_argument(
        "--keys", nargs="+", default=[], metavar="KEY=ACTION", help="keys for a Discrete space's actions"
    )
    parser.add_argument("--role", choices=["player", "spectator"], help="role in a real-time world")
    parser.add_argument("--player", metavar="NAME", help="your name in the server's recordings")
    parser.add_argument("--fps", type=positive, metavar="X", help="frames per second (default: the environment's own)")
    parser.add_argument("--frames", type=positive_int, metavar="N", help="stop after N frames")
    parser.add_argument("--scale", type=positive_int, default=0, metavar="N", help="enlarge the picture N times")
    add_wait_option(parser)
    add_credential_options(parser)
    parser.set_defaults(run=run)


register = add_play_parser


def read_keys(pygame: Any, pairs: Sequence[str], space: Space[Any]) -> dict[frozenset[str], Any]:
    """Read KEY=ACTION pairs; KEY may be several keys held together, as in `left+space=3`.

    Raises:
        SettingError: A pair is malformed, there is no such key, or the action is not in the space.
    """
    found: dict[frozenset[str], Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            # Normalise to the name that events use: "left" for "Left".
            held = frozenset(pygame.key.name(pygame.key.key_code(name)) for name in key.split("+"))
            action = int(text)
        except ValueError:  # no such key, or no number
            action = None
        if not equals or action is None or not space.contains(action):
            raise SettingError(
                f"expected --keys KEY=ACTION with a key such as a, left or space, and an action of {space}, "
                f"got {pair!r}"
            )
        found[held] = action
    return found


class Keyboard:
    """Turns held keys into an action.

    Args:
        space: The action space, Discrete or Box; for any other space the action is always `neutral`.
        keys: Actions of a Discrete space, by the set of held keys.
        neutral: The action while no key is held.
    """

    def __init__(self, space: Space[Any], keys: Mapping[frozenset[str], Any], neutral: Any) -> None:
        self.held: set[str] = set()
        """The names of the held keys."""
        self._space, self._keys, self._neutral = space, keys, neutral

    @property
    def pressed(self) -> bool:
        """True if the held keys have an action."""
        return any(keys <= self.held for keys in self._keys)

    def action(self) -> Any:
        """Return the action of the largest held set of keys."""
        if isinstance(self._space, spaces.Box):
            return self._steer(self._space)
        fitting = [keys for keys in self._keys if keys <= self.held]
        return self._keys[max(fitting, key=len)] if fitting else self._neutral

    def _steer(self, space: spaces.Box) -> Any:
        action = np.array(self._neutral)
        if action.dtype.kind != "f":
            return action
        flat, low, high = action.reshape(-1), space.low.reshape(-1), space.high.reshape(-1)
        for index, (less, more) in enumerate((("left", "right"), ("down", "up"))[: flat.size]):
            if less in self.held and np.isfinite(low[index]):
                flat[index] = low[index]
            elif more in self.held and np.isfinite(high[index]):
                flat[index] = high[index]
        return flat.reshape(space.shape)


def describe(info: Mapping[str, Any], score: float, fps: float) -> list[str]:
    """Return the lines of text below the picture."""
    lines = [f"return {score:g}   {fps:.1f} steps/s"]
    latency = info.get("latency")
    if latency is not None:
        lines.append(f"round trip {latency['round_trip'] * 1e3:.1f} ms   age {latency['observation_age'] * 1e3:.1f} ms")
        lines.append(
            f"action delay {latency['action_delay'] * 1e3:.1f} ms   skipped {latency['frames_skipped']}   "
            f"overruns {latency['overruns']}"
        )
    if info.get("episodes"):
        lines.append("ended: " + ", ".join(f"{record['return']:g}" for record in info["episodes"]))
    return lines


def _connect(arguments: argparse.Namespace) -> RemoteEnv:
    """Connect with pictures if the environment has them."""
    player = None if arguments.player is None else f"person:{arguments.player}"
    keywords = {"role": arguments.role, "player": player, "wait_for_server": arguments.wait_for_server}
    keywords.update(credential_keywords(arguments))
    if "world=" in arguments.url:
        return RemoteEnv(arguments.url, **keywords)
    try:
        return RemoteEnv(arguments.url, render_mode="rgb_array", **keywords)
    except RefusedError:  # it has no such render mode: show its observations
        return RemoteEnv(arguments.url, **keywords)


def _check_display(pygame: Any) -> None:
    """Raise SettingError if there is no display. A video driver chosen by the user is not checked."""
    if "SDL_VIDEODRIVER" in os.environ:
        return
    try:
        pygame.display.init()
    except pygame.error as error:
        raise SettingError(f"{_NO_DISPLAY}: {error}") from None
    if pygame.display.get_driver() in ("dummy", "offscreen"):  # SDL's last resort
        raise SettingError(_NO_DISPLAY)


def run(arguments: argparse.Namespace) -> int:
    """Play until Escape, until the window is closed, or for `--frames`."""
    with needed("gymnasium-bridge play needs pygame", "play"):
        import pygame
    with feature("web", "gymnasium-bridge play"):
        from bridge.web.controls import default_keys, does_nothing, known_names
    from bridge.core.worlds.group import neutral_action

    env = _connect(arguments)
    try:
        _check_display(pygame)
        pygame.init()
        space = env.action_space
        meanings = known_names(env.spec, space)
        with contextlib.suppress(RefusedError):  # only Atari has this method
            meanings = env.call("get_action_meanings")
        keys = {**default_keys(space, meanings), **read_keys(pygame, arguments.keys, space)}
        idle = [position for position in range(len(meanings or ())) if does_nothing(meanings, position)]
        neutral = space.start + idle[0] if isinstance(space, spaces.Discrete) and idle else neutral_action(space)
        keyboard = Keyboard(space, keys, neutral)
        fps = arguments.fps or env.fps or env.metadata.get("render_fps") or 30.0
        waits = env.fps is None and isinstance(space, spaces.Discrete) and not idle
        _loop(pygame, env, keyboard, float(fps), waits, arguments)
    finally:
        pygame.quit()
        env.close()
    return OK


def _loop(
    pygame: Any, env: RemoteEnv, keyboard: Keyboard, fps: float, waits: bool, arguments: argparse.Namespace
) -> None:
    """Step and draw once in each frame. `waits`: do not step while no key is held."""
    font = pygame.font.Font(None, 20)
    clock = pygame.time.Clock()
    observation, info = env.reset()
    score, ended, frames, window = 0.0, False, 0, None
    while arguments.frames is None or frames < arguments.frames:
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                return
            if event.type == pygame.KEYDOWN:
                keyboard.held.add(pygame.key.name(event.key))
                ended = ended or event.key == pygame.K_BACKSPACE
            elif event.type == pygame.KEYUP:
                keyboard.held.discard(pygame.key.name(event.key))
        if ended:
            observation, info = env.reset()
            score, ended = 0.0, False
        elif not waits or keyboard.pressed:
            observation, reward, terminated, truncated, info = env.step(keyboard.action())
            score += reward
            ended = terminated or truncated
        picture = env.render() if env.render_mode == "rgb_array" else observation
        lines = describe(info, score, clock.get_fps())
        if waits and not keyboard.pressed:
            lines.append("no key is held: the environment waits")
        window = draw(pygame, window, font, picture, lines, arguments.scale)
        frames += 1
        clock.tick(fps)
        if ended:
            time.sleep(min(0.5, 10 / fps))  # so that a person sees the end


def draw(pygame: Any, window: Any, font: Any, picture: Any, lines: Sequence[str], scale: int) -> Any:
    """Draw a picture and lines of text below it; make a new window if the size does not fit.

    Args:
        pygame: The package.
        window: The current window; None: there is none.
        font: The font of the lines.
        picture: An array of shape (height, width, 3) and dtype uint8; for anything else there are only lines.
        lines: The lines of text.
        scale: The factor by which the picture is enlarged; 0: choose one.
    """
    if isinstance(picture, np.ndarray) and picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8:
        surface = pygame.surfarray.make_surface(picture.swapaxes(0, 1))
    else:
        surface = pygame.Surface((480, 120))
        lines = [*lines, f"{picture}"[:60]]
    times = scale or max(1, 480 // surface.get_width())
    surface = pygame.transform.scale(surface, (surface.get_width() * times, surface.get_height() * times))
    width, height = surface.get_size()
    size = width, height + _LINE * len(lines) + 2 * _MARGIN  # the lines must not cover a score in the picture
    if window is None or window.get_width() != width or window.get_height() < size[1]:  # its height never shrinks
        window = pygame.display.set_mode(size)
        pygame.display.set_caption("gymnasium-bridge play")
    window.fill((0, 0, 0))
    window.blit(surface, (0, 0))
    for number, line in enumerate(lines):
        window.blit(font.render(line, True, (255, 255, 255), (0, 0, 0)), (_MARGIN, height + _MARGIN + _LINE * number))
    pygame.display.flip()
    return window
