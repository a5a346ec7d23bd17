"""A pygame game with a loop of its own, catch the dot: by arrow keys at its window, by agents, and in a browser.

It prints its URLs; `--help` says what else it can do:
    python examples/game_loop.py
"""

import argparse
import threading
import time

import numpy as np
import pygame
from gymnasium import spaces

from bridge import Recording, Web, make_remote, serve_game

SIZE, FRAMES, MOVES = 12, 300, [(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)]  # stay, up, down, left, right
KEYS = [pygame.K_SPACE, pygame.K_UP, pygame.K_DOWN, pygame.K_LEFT, pygame.K_RIGHT]


def draw(screen: pygame.Surface, player: np.ndarray, dot: np.ndarray) -> np.ndarray:
    """Draw a frame; return its pixels, uint8 `(height, width, 3)`."""
    screen.fill("black")
    pygame.draw.rect(screen, "orange", (*(dot * 20), 20, 20))
    pygame.draw.rect(screen, "white", (*(player * 20), 20, 20))
    pygame.display.flip()
    return pygame.surfarray.array3d(screen).swapaxes(0, 1)


def play_at_random(url: str, over: threading.Event) -> None:
    """Play over the network until the game is over."""
    env = make_remote(url)
    env.reset(seed=0)
    while not over.wait(1 / 30):
        if env.step(env.action_space.sample())[3]:  # truncated: the round is over
            env.reset()
    env.close()


def main() -> None:
    """Run the game."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="where agents connect to (default: any)")
    parser.add_argument("--web", action="store_true", help="let people watch and play in a browser")
    parser.add_argument("--record", type=lambda folder: Recording(folder, frames=True), help="a folder to record in")
    parser.add_argument("--agent", action="store_true", help="have a random agent play over the network")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many seconds")
    options = parser.parse_args()
    screen, clock = pygame.display.set_mode((SIZE * 20, SIZE * 20)), pygame.time.Clock()
    over, began, caught, frames = threading.Event(), time.monotonic(), 0, 0
    player, dot, frame, reward, info, random = np.zeros(2, int), np.ones(2, int), 0, 0.0, {}, np.random.default_rng()
    seen, moves = spaces.Box(0, SIZE - 1, (4,), np.float32), spaces.Discrete(len(MOVES))
    web = options.web and Web(action_names="NOOP,UP,DOWN,LEFT,RIGHT")
    with serve_game(seen, moves, name="Dots", port=options.port, web=web, record=options.record) as game:
        print(f"play at {game.url}" + (f", or in a browser at {game.web_url}" if options.web else ""), flush=True)
        agent = threading.Thread(target=play_at_random, args=(game.url, over))
        if options.agent:
            agent.start()
        while time.monotonic() < began + options.seconds and not pygame.event.get(pygame.QUIT):
            pixels, position = draw(screen, player, dot), np.concatenate([player, dot])
            action = game.exchange(position, reward, truncated=frame == FRAMES, info=info, frame=pixels)
            if game.begins:
                random, frame, reward, info = np.random.default_rng(game.seed), 0, 0.0, {}
                player, dot = random.integers(SIZE, size=(2, 2))
                continue
            keys = [move for move, key in enumerate(KEYS) if pygame.key.get_pressed()[key]]
            action = keys[0] if keys else action  # who is at the window; agents are told so
            info = {"intervention": True, "intervened_by": "window", "intervene_action": action} if keys else {}
            player = np.clip(player + MOVES[action], 0, SIZE - 1)
            reward, frame, frames = float((player == dot).all()), frame + 1, frames + 1
            caught, dot = caught + int(reward), random.integers(SIZE, size=2) if reward else dot
            clock.tick(30)
        over.set()
        if options.agent:
            agent.join()
    print(f"{caught} dots, {frames / (time.monotonic() - began):.1f} frames a second")


if __name__ == "__main__":
    main()
