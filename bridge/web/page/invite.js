// Invitations: a link to a world or a seat, with a QR code for phones.

import {$} from "./dom.js";
import {qrCode} from "./qr.js";
import {serverOf, state, worldOf} from "./state.js";
import {announce} from "./words.js";

const MARGIN = 4; // modules around a code

// The link. All its data is in the fragment, which is not sent to servers.
function link() {
  const said = new URLSearchParams();
  if (state.selected !== null) said.set("world", state.selected);
  if ($("invite-seat").value) said.set("seat", $("invite-seat").value);
  if (state.token && $("invite-token").checked) said.set("token", state.token);
  const fragment = said.toString();
  return location.origin + location.pathname + location.search + (fragment && `#${fragment}`);
}

function drawLink() {
  const text = link();
  $("invite-link").value = text;
  const code = qrCode(text);
  $("invite-code").hidden = !code;
  $("invite-hint").textContent = hint(Boolean(code));
  if (!code) return;
  const size = code.length + 2 * MARGIN;
  const dark = code.flatMap((row, y) => row.flatMap((value, x) => (value ? [`M${x + MARGIN} ${y + MARGIN}h1v1h-1z`] : [])));
  $("invite-code").setAttribute("viewBox", `0 0 ${size} ${size}`);
  $("invite-code").querySelector("path").setAttribute("d", dark.join(""));
}

function hint(fits) {
  if (/^(localhost|127\.|\[::1\])/.test(location.host)) return "This address only works on this computer. To invite others, start the server with --host 0.0.0.0, and open the page by the computer's name or address.";
  if (!fits) return "The link is too long for a QR code.";
  return state.token && $("invite-token").checked ? "Anyone with this link has the same permissions as you." : "Open the link, or point a phone's camera at the code.";
}

function open() {
  const world = worldOf(state.selected);
  const seats = (world?.lanes ?? 0) > 1 || world?.replay ? [] : Object.keys(world?.seats ?? {});
  $("invite-seat").replaceChildren(new Option("any, or to watch", ""), ...seats.map((seat) => new Option(seat, seat)));
  $("invite-seat-label").hidden = seats.length < 2;
  $("invite-token-label").hidden = !state.token;
  drawLink();
  $("invite").showModal();
}

async function copy() {
  $("invite-link").select();
  try {
    await navigator.clipboard.writeText($("invite-link").value);
    $("invite-copy").textContent = "Copied";
    setTimeout(() => ($("invite-copy").textContent = "Copy"), 2000);
  } catch {
    $("invite-hint").textContent = "The link is selected: copy it."; // without HTTPS a page cannot write to the clipboard
  }
}

// Announce an invitation when the list of worlds has arrived.
export function greet() {
  const {invitation} = state;
  if (!invitation) return;
  state.invitation = null;
  const world = worldOf(state.selected);
  if (invitation.world && !worldOf(invitation.world)) return announce("The world of this invitation has ended.");
  if (invitation.seat && [...$("seat").options].some(({value}) => value === invitation.seat)) $("seat").value = invitation.seat;
  const [taken] = invitation.seat ? [world?.seats?.[invitation.seat]] : [false];
  const what = invitation.seat ? `to play ${invitation.seat}` : `to ${world?.title ?? serverOf(world).title}`;
  announce(taken ? `You are invited ${what}, but somebody has the seat.` : `You are invited ${what}: press Play.`);
}

export function startInvitations() {
  $("invite-open").onclick = open;
  $("invite-close").onclick = () => $("invite").close();
  $("invite-copy").onclick = copy;
  $("invite-seat").onchange = $("invite-token").onchange = drawLink;
}
