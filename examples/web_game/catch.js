// A small game: move the paddle so that it catches each falling ball. An episode has five balls.

import {box, discrete, serve} from "./bridge_env.js";

const PADDLE = 0.12; // half of its width, of a field from -1 to 1
const SPEED = 0.1; // of the paddle, per step
const FALL = 0.1; // of the ball, per step
const BALLS = 5;
const SIZE = 240; // pixels

// Numbers from 0 to 1 that depend only on the seed (mulberry32), so that the same seed gives the same episode.
function random(seed) {
  let state = (seed ?? Math.floor(Math.random() * 2 ** 32)) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

class Catch {
  // The positions of the paddle and the ball, and the height of the ball.
  observationSpace = box(-1, 1, [3]);
  // Left, stay, right.
  actionSpace = discrete(3);

  constructor(place) {
    this.canvas = Object.assign(document.createElement("canvas"), {width: SIZE, height: SIZE});
    place.append(this.canvas);
    this.caught = this.balls = this.paddle = this.ball = 0;
    this.height = 1;
    this.random = random();
    this.draw();
  }

  reset(seed) {
    if (seed !== undefined) this.random = random(seed); // without one the next episode goes on with the same numbers
    this.caught = this.balls = this.paddle = 0;
    this.drop();
    return this.observe();
  }

  drop() {
    this.ball = 2 * this.random() - 1;
    this.height = 1;
  }

  step(action) {
    this.paddle = Math.min(1, Math.max(-1, this.paddle + SPEED * (action - 1)));
    this.height -= FALL;
    let reward = 0;
    if (this.height <= -1) {
      const hit = Math.abs(this.ball - this.paddle) <= PADDLE;
      reward = hit ? 1 : -1;
      this.caught += hit;
      this.balls += 1;
      this.drop();
    }
    return {observation: this.observe(), reward, terminated: this.balls === BALLS, truncated: false};
  }

  observe() {
    this.stale = true;
    return [this.paddle, this.ball, this.height];
  }

  // Drawn whenever the screen updates, whatever the number of steps per second.
  draw() {
    if (this.closed) return;
    requestAnimationFrame(() => this.draw());
    if (this.stale === false) return;
    this.stale = false;
    const context = this.canvas.getContext("2d");
    const at = (value) => ((value + 1) / 2) * SIZE;
    context.fillStyle = "#10202c";
    context.fillRect(0, 0, SIZE, SIZE);
    context.fillStyle = "#4fc3f7";
    context.fillRect(at(this.paddle - PADDLE), SIZE - 10, PADDLE * SIZE, 10);
    context.fillStyle = "#ffd54f";
    context.beginPath();
    context.arc(at(this.ball), SIZE - at(this.height), 7, 0, 2 * Math.PI);
    context.fill();
    context.font = "16px sans-serif";
    context.fillText(`caught ${this.caught} of ${this.balls}`, 10, 24);
  }

  close() {
    this.closed = true;
    this.canvas.remove();
  }
}

const options = new URLSearchParams(location.search);
serve(options.get("dial") ?? "ws://127.0.0.1:6100", () => new Catch(document.getElementById("games")), {
  name: options.get("name") ?? undefined,
  token: options.get("token") ?? undefined,
  fps: Number(options.get("fps")) || undefined,
  onstatus: (text) => (document.getElementById("status").textContent = text),
});
