"""Map a person's keys to actions, by the environment's own `get_keys_to_action` or by the action space."""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from bridge.core.worlds.environment import EnvFacts
from bridge.core.worlds.group import neutral_action
from bridge.core.worlds.kinds import GymEnv, Lanes, metadata_of, read_attribute, spec_of

__all__ = [
    "ACTION_NAMES",
    "controls_of",
    "controls_of_agent",
    "controls_of_space",
    "default_keys",
    "does_nothing",
    "known_agent_names",
    "known_names",
]

_MEANINGS = {"UP": "up", "DOWN": "down", "LEFT": "left", "RIGHT": "right", "FORWARD": "up", "FIRE": "space"}
ACTION_NAMES = {
    "Acrobot": ("LEFT", "NOOP", "RIGHT"),
    "Blackjack": ("STICK", "HIT"),
    "CarRacing": ("NOOP", "RIGHT", "LEFT", "UP: GAS", "DOWN: BRAKE"),
    "CartPole": ("LEFT", "RIGHT"),
    "CliffWalking": ("UP", "RIGHT", "DOWN", "LEFT"),
    "FrozenLake": ("LEFT", "DOWN", "RIGHT", "UP"),
    "LunarLander": ("NOOP", "LEFT ENGINE", "UP: MAIN ENGINE", "RIGHT ENGINE"),
    "MountainCar": ("LEFT", "NOOP", "RIGHT"),
    "Taxi": ("DOWN", "UP", "RIGHT", "LEFT", "TAKE IN", "DROP OFF"),
}
"""The action names of Gymnasium's own environments, from their documentation; the environments do not have them."""
AXES = {
    "CarRacing": (("steer", "left", "right"), ("gas", "", "up"), ("brake", "", "down")),
    "LunarLander": (("main engine", "", "up"), ("side engine", "left", "right")),
    "MountainCarContinuous": (("push", "left", "right"),),
    "Pendulum": (("torque", "left", "right"),),
}
"""For environments whose action is an array: the name of each number, and the keys that decrease and increase it."""
AGENTS_ACTION_NAMES = {"simple": ("NOOP", "LEFT", "RIGHT", "DOWN", "UP")}
"""Action names of environments with several agents, by the first word of their names: those of mpe2 (once
PettingZoo)."""
# Codes of keys in pygame that are not characters; the small ones are those of pygame 1, as in MountainCar.
_CODES = {
    273: "up",
    274: "down",
    275: "right",
    276: "left",
    1073741903: "right",
    1073741904: "left",
    1073741905: "down",
    1073741906: "up",
    1073742048: "control",
    1073742049: "shift",
    32: "space",
    13: "return",
}
_WORDS = {" ": "space", "\r": "return"}
_RUN_TOGETHER = re.compile("(UP|DOWN|LEFT|RIGHT|FIRE)+")
_NO_OPS = ("NOOP", "NO-OP", "NO_OP", "NOTHING", "DO NOTHING")
_AXES = (("left", "right"), ("down", "up"), ("a", "d"), ("s", "w"))
# Box spaces with more numbers than this get no keys.
_MOST_NUMBERS = 16


def default_keys(
    space: Space[object], meanings: Sequence[str] | None, default: Any = None
) -> dict[frozenset[str], int]:
    """Return keys for a Discrete space: digits, and arrows for actions that are directions or for up to four actions.

    For more than ten actions without names, the further ones get letters. An action whose name is not a direction also
    gets the first free letter of its name. Of three actions without names, `default` or the middle one gets no arrow.
    """
    if not isinstance(space, spaces.Discrete):
        return {}
    first, count = int(space.start), int(space.n)
    signs = "0123456789" if meanings is not None else "0123456789bcefghijklmnopqrtuvxyz"  # w, a, s, d act as arrows
    keys = {frozenset({sign}): first + index for index, sign in enumerate(signs[:count])}
    if meanings is not None:
        # If several names have the same arrows, the plainest gets them: LEFT, and not DASH LEFT.
        plainest = sorted(range(count), key=lambda action: len(_words(meanings[action].upper())))
        others = list[int]()
        for action in plainest:
            held = _directions(meanings[action])
            if held and held not in keys:
                keys[held] = first + action
            elif not does_nothing(meanings, action):
                others.append(action)
        own = dict[str, str]()
        for action in sorted(others, key=lambda action: (bool(_directions(meanings[action])), action)):
            # Combined like FIRE: if JUMP is an action, JUMP LEFT is played with JUMP's key and the arrow together.
            held, rest = _directions(meanings[action]), _without_directions(meanings[action])
            if held and rest in own and (both := held | {own[rest]}) not in keys:
                keys[both] = first + action
                continue
            taken = "wasd" if held else ""  # many people use these as arrows
            letters = (letter for letter in meanings[action].lower() if "a" <= letter <= "z" and letter not in taken)
            if (letter := next((letter for letter in letters if frozenset({letter}) not in keys), None)) is not None:
                keys[frozenset({letter})] = first + action
                own.setdefault(meanings[action].upper(), letter)
    elif count <= 4:
        order = ["left", "right"] if count <= 3 else ["left", "down", "right", "up"]
        if count == 3:
            order.insert(1 if default is None else int(default) - first, "")
        keys |= {frozenset({key}): first + action for action, key in enumerate(order[:count]) if key}
    return keys


def _directions(meaning: str) -> frozenset[str]:
    """Return the keys for the directions, and FIRE, that a name contains."""
    return frozenset(_MEANINGS[word] for word in _words(meaning.upper()) if word in _MEANINGS)


def _without_directions(meaning: str) -> str:
    return " ".join(word for word in _words(meaning.upper()) if word not in _MEANINGS)


def _words(meaning: str) -> list[str]:
    """Return the words of a name: PICKUP is one word, not a direction; Atari's UPRIGHTFIRE is three."""
    return re.findall("UP|DOWN|LEFT|RIGHT|FIRE" if _RUN_TOGETHER.fullmatch(meaning) else "[A-Z]+", meaning)


def known_names(spec: EnvSpec | None, space: Space[object]) -> list[str] | None:
    """Return the action names of one of Gymnasium's own environments; None for any other environment.

    Args:
        spec: The environment's spec.
        space: Its action space.
    """
    # Environments of other packages have a namespace, and may have the same name.
    return _fitting(ACTION_NAMES.get(spec.name) if spec is not None and spec.namespace is None else None, space)


def known_agent_names(name: str, space: Space[object]) -> list[str] | None:
    """Return an agent's action names in an environment of several agents; None if they are unknown.

    Args:
        name: The name in the environment's metadata.
        space: The agent's action space: agents that also communicate have other actions.
    """
    return _fitting(AGENTS_ACTION_NAMES.get(name.split("_", 1)[0]), space)


def _fitting(names: Sequence[str] | None, space: Space[object]) -> list[str] | None:
    # A wrapper may have changed the actions, and wrong names would mislead.
    return list(names) if names is not None and isinstance(space, spaces.Discrete) and space.n == len(names) else None


def does_nothing(names: Sequence[str] | None, position: int) -> bool:
    """Return True if the name of an action says that it does nothing.

    Args:
        names: The names of the actions; None: they have no names.
        position: The index of the action.
    """
    return names is not None and position < len(names) and names[position].upper() in _NO_OPS


def controls_of(env: GymEnv | Lanes) -> str:
    """Return the key mapping of an environment as JSON; prefer its own `get_keys_to_action`.

    Args:
        env: A Gymnasium environment, or a vector of them; call this in its thread.
    """
    if isinstance(env, VectorEnv):
        return json.dumps({"kind": "none", "why": "this world has lanes, which are not played by keys"})
    own: dict[frozenset[str], int] = {}
    names: list[str] | None = None
    with contextlib.suppress(Exception):  # if the environment's own function raises anything, it has no keys
        own = {_held(keys): int(action) for keys, action in env.get_wrapper_attr("get_keys_to_action")().items()}
    with contextlib.suppress(Exception):
        names = [str(name) for name in env.get_wrapper_attr("get_action_meanings")()]
    spec = spec_of(env)
    # A wrapper that removes actions may not know the names, which would then belong to other actions.
    names = _fitting(names, env.action_space) or _enum_names(env) or known_names(spec, env.action_space)
    axes = AXES.get(spec.name) if spec is not None and spec.namespace is None else None
    fps = metadata_of(env).get("render_fps")
    # A program with a loop of its own declares its default action.
    default = read_attribute(env, "default_action", None)
    rate = float(fps) if isinstance(fps, (int, float)) else None
    return controls_of_space(env.action_space, own, names, rate, axes, default)


def controls_of_agent(facts: EnvFacts, agent: str, space: Space[object]) -> str:
    """Return the key mapping of one of several agents, or of one lane, as JSON.

    Args:
        facts: The facts about the environment.
        agent: The agent's name.
        space: Its action space.
    """
    names = _fitting(facts.action_names, space) or known_agent_names(facts.name, space)
    return controls_of_space(space, names=names, default=facts.default_actions.get(agent))


def _enum_names(env: GymEnv) -> list[str] | None:
    """Return the names of an Enum of actions, which MiniGrid has as `actions`; None if there is none."""
    kind = read_attribute(env, "actions", None)
    if not (inspect.isclass(kind) and issubclass(kind, enum.Enum) and isinstance(env.action_space, spaces.Discrete)):
        return None
    by_value = {member.value: member.name for member in kind}
    numbers = range(int(env.action_space.start), int(env.action_space.start + env.action_space.n))
    return [by_value[number].replace("_", " ") for number in numbers] if set(numbers) <= set(by_value) else None


def controls_of_space(
    space: Space[object],
    own: Mapping[frozenset[str], int] | None = None,
    names: list[str] | None = None,
    fps: float | None = None,
    axes: Sequence[tuple[str, str, str]] | None = None,
    default: Any = None,
) -> str:
    """Return the key mapping of an action space as JSON.

    `kind` is `discrete`, with `keys`, a list of `keys` that are held together and their `action`; or `box`, with
    `axes`, a list of the `index` of a number, its `name`, and its keys for `less` and `more`, which may be empty; or
    `none`, with `why`. `neutral` is the action without a key; `idle` is true if it is known to do nothing. `fps` is the
    environment's rate in steps per second, or null.

    Args:
        space: The action space.
        own: The actions for combinations of keys, from the environment's `get_keys_to_action`.
        names: The names of the actions.
        fps: `render_fps` in the environment's metadata; None: it has none.
        axes: The name of each number of a Box, with its keys for less and more; None: they have no names.
        default: The action while nobody acts; None, or an invalid action: unknown.
    """
    if default is not None and not space.contains(default):
        default = None
    if isinstance(space, spaces.Discrete):
        found = {held: action for held, action in (own or {}).items() if space.contains(action)}
        no_key = found.pop(frozenset(), None)
        keys = found or default_keys(space, names, default)
        # Arrows are preferred to digits; each action needs one entry.
        entries: dict[int, frozenset[str]] = {}
        for held, action in sorted(keys.items(), key=lambda item: (min(item[0]).isdigit(), item[1])):
            entries.setdefault(action, held)
        neutral = int(neutral_action(space) if default is None else default) if no_key is None else no_key
        if no_key is None and names is not None:
            nothing = (position for position in range(len(names)) if does_nothing(names, position))
            neutral = next((int(space.start) + position for position in nothing), neutral)
        between = not found and names is None and int(space.n) == 3
        if between and default is None:  # left and right
            neutral = int(space.start) + 1
        middle = between and neutral == int(space.start) + 1
        idle = no_key is not None or middle or does_nothing(names, neutral - int(space.start))
        if idle and neutral in entries and (found or min(entries[neutral]).isdigit()):
            del entries[neutral]  # without a key it is chosen anyway
        return json.dumps(
            {
                "kind": "discrete",
                "fps": fps,
                "start": int(space.start),
                "n": int(space.n),
                "neutral": neutral,
                "idle": idle,
                "names": names,
                "keys": [{"keys": sorted(held), "action": action} for action, held in sorted(entries.items())],
            }
        )
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        count = int(np.prod(space.shape))
        if 0 < count <= _MOST_NUMBERS:
            # JSON has no infinity.
            low, high = (np.clip(bound, -1e6, 1e6).reshape(-1).tolist() for bound in (space.low, space.high))
            neutral_numbers = (
                np.asarray(neutral_action(space) if default is None else default, np.float64).reshape(-1).tolist()
            )
            if axes is None or len(axes) != count:
                axes = [(str(index), less, more) for index, (less, more) in enumerate(_AXES[:count])]
            return json.dumps(
                {
                    "kind": "box",
                    "fps": fps,
                    "shape": list(space.shape),
                    "low": low,
                    "high": high,
                    "neutral": neutral_numbers,
                    "axes": [
                        {"index": index, "name": name, "less": less, "more": more}
                        for index, (name, less, more) in enumerate(axes)
                    ],
                }
            )
    return json.dumps({"kind": "none", "why": f"there are no keys for actions of {type(space).__name__}"})


def _held(keys: Any) -> frozenset[str]:
    """Return the names of keys that are held together, given as in `get_keys_to_action`: characters or codes."""
    if isinstance(keys, (str, int)) or keys is None:
        keys = () if keys is None else (keys,)
    return frozenset(_name(key) for key in keys if key is not None)


def _name(key: Any) -> str:
    if isinstance(key, (int, np.integer)):
        # Other keys without a character in pygame, such as those of the keypad, are not supported by the page.
        return _CODES.get(int(key)) or (chr(int(key)).lower() if 0 <= key < 0x110000 else f"key {key}")
    return _WORDS.get(key) or str(key).lower()
