// The worlds of a running evaluation as small pictures side by side, and the results so far. A click selects a world.

import {Stream} from "./client.js";
import {$, pause} from "./dom.js";
import {kindOf, short, state} from "./state.js";
import {request, textTensor, values} from "./wire.js";
import {select} from "./worlds.js";

const MOST = 16;
const PACE = 100; // milliseconds between two pictures of a world
const tiles = new Map(); // by the name of a world: {button, stream}

export function drawMosaic() {
  const {note, worlds} = state.server;
  $("running").hidden = !note;
  if ($("note").textContent !== (note ?? "")) $("note").textContent = note ?? "";
  const shown = note && state.connected ? worlds.filter((world) => !world.waiting && !world.replay && world.kind !== "perlert").slice(0, MOST) : [];
  for (const [name, {button, stream}] of tiles) {
    if (shown.some((world) => world.name === name)) continue;
    tiles.delete(name);
    stream.close();
    button.remove();
  }
  for (const world of shown) if (!tiles.has(world.name)) open(world);
  for (const [name, {button}] of tiles) button.setAttribute("aria-current", String(name === state.selected));
}

async function open({name, title}) {
  const canvas = document.createElement("canvas");
  const button = document.createElement("button");
  button.setAttribute("aria-label", `Look at ${short(title)}, ${name}`);
  button.append(canvas);
  button.onclick = () => select(name);
  const stream = new Stream(state.token);
  tiles.set(name, {button, stream});
  $("mosaic").append(button);
  try {
    const joined = await stream.ask(request.join(name, {role: textTensor("spectator"), frame: textTensor(kindOf(name))}));
    const frame = joined.observations.get("frame").uid;
    while (stream.open) {
      const answer = await stream.ask(request.step([], [frame]));
      const data = values(answer.observations.get(frame));
      if (data.length) await paint(canvas, data);
      await pause(PACE);
    }
  } catch { // the world has ended, or does not render: the tile stays while the world is in the list
    stream.close();
  }
}

async function paint(canvas, data) {
  const bitmap = await createImageBitmap(new Blob([data.slice()]));
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
  canvas.dataset.pictures = String(Number(canvas.dataset.pictures ?? 0) + 1);
}
