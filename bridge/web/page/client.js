// One stream of dm_env_rpc over a WebSocket: requests are answered one at a time, in order.

import {pause} from "./dom.js";
import {request, response, values} from "./wire.js";

const PATH = "/dm_env_rpc.v1.Environment/Process";
const SUBPROTOCOL = "dm_env_rpc.v1";

export class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

const DEADLINE_EXCEEDED = 4;
export const UNAUTHENTICATED = 16;
export const UNAVAILABLE = 14;

export class Stream {
  #socket;
  #waiting = [];
  #ended = null;

  // For a stream that watches a world: the key mapping, after joining.
  /** @type {Promise<{fps?: number | null}> | null} */
  controls = null;

  constructor(token) {
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const names = [SUBPROTOCOL];
    if (token) {
      const bytes = String.fromCharCode(...new TextEncoder().encode(token));
      names.push("bridge.token." + btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", ""));
    }
    this.#socket = new WebSocket(`${scheme}//${location.host}${PATH}`, names);
    this.#socket.binaryType = "arraybuffer";
    /** @type {Promise<void>} */
    this.opened = new Promise((resolve, reject) => {
      this.#socket.onopen = () => resolve();
      this.#socket.onclose = ({code, reason}) => {
        // From 4000 on it is a status code of the server, with a message; otherwise the connection was lost.
        const error = code >= 4000 && code < 5000
          ? new Refused(code - 4000, reason)
          : new Refused(UNAVAILABLE, reason || "the connection was lost");
        this.#end(error);
        reject(error);
      };
    });
    this.opened.catch(() => {});
    this.#socket.onmessage = ({data}) => {
      const waiting = this.#waiting.shift();
      const answer = response(new Uint8Array(data));
      if (!waiting) return;
      if (answer.kind === "error") waiting.reject(new Refused(answer.code, answer.message));
      else waiting.resolve(answer);
    };
  }

  get open() {
    return this.#ended === null;
  }

  #end(error) {
    this.#ended ??= error;
    for (const waiting of this.#waiting.splice(0)) waiting.reject(this.#ended);
  }

  async ask(bytes) {
    await this.opened;
    if (this.#ended) throw this.#ended;
    return new Promise((resolve, reject) => {
      this.#waiting.push({resolve, reject});
      if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(new Uint8Array(bytes)); // otherwise the close event rejects the request
    });
  }

  // Repeat the request while the program behind the world stands still: a game may be in its menu.
  async askUntilItGoesOn(bytes) {
    for (;;) {
      try {
        return await this.ask(bytes);
      } catch (error) {
        if (error.code !== DEADLINE_EXCEEDED || !error.message.includes("stands still")) throw error;
      }
      await pause(300);
    }
  }

  async property(key) {
    const answer = await this.ask(request.property(key));
    return answer.value ? values(answer.value)[0] : undefined;
  }

  // Leave the world, then close: after a connection that only ends, the server keeps the seat.
  async leave() {
    if (!this.open) return;
    await Promise.race([this.ask(request.leave()).catch(() => {}), new Promise((resolve) => setTimeout(resolve, 1000))]);
    this.close();
  }

  close(error = new Refused(1, "closed here")) {
    this.#end(error);
    this.#socket.close(1000);
  }
}
