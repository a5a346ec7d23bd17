// A match: who has which seat, who is ready, the countdown, and the result of a round. It shows the server's `world.match`
// (docs/protocol.md), and tells the rest of the page when the person is ready.

import {$, replaceKeepingFocus, works} from "./dom.js";

const PACE = {countdown: 100, starting: 100, running: 300, gathering: 300};

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value) {
  return value === null || value === undefined ? "–" : String(Number(value.toFixed(2)));
}

function list(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

// The name of a player among others: with the seat, if several have the same name.
function called(one, all) {
  return all.filter(({name}) => name === one.name).length > 1 ? `${one.seat} (${one.name})` : one.name;
}

// The key to press, if there is a keyboard.
function press(why) {
  return matchMedia("(pointer: coarse)").matches ? "" : `Press Enter ${why}.`;
}

export class MatchView {
  #match = null;
  #seat = null; // the seat of the person at this page
  #played = null; // {round, seat}: the last round that the person played
  #shown = "";
  #endsAt = 0; // when the countdown ends
  #begun = []; // promises that wait for a round: {after, resolve}
  #actions;

  // actions: sit(seat) takes a free seat; ready(value) says whether the person is ready; announce(text).
  constructor(actions) {
    this.#actions = actions;
    setInterval(() => this.#count(), 100);
    $("ready").onclick = () => actions.ready(!this.#own?.ready);
    window.addEventListener("keydown", (event) => this.#pressed(event), true);
  }

  get #own() {
    return this.#match?.seats.find(({seat}) => seat === this.#seat);
  }

  // Milliseconds until the next request to the server.
  get pace() {
    return this.#match ? PACE[this.#match.state] ?? 300 : 1000;
  }

  // Update from the server; null: there is no match. `seat`: the person's own, null while watching.
  show(match, seat) {
    const before = this.#seat === seat ? this.#match : null;
    this.#match = match;
    this.#seat = seat;
    if (match?.state === "running" && this.#own?.playing) this.#played = {round: match.round, seat};
    if (match?.countdown != null) this.#endsAt = performance.now() + match.countdown * 1000;
    if (match && before) this.#tell(before, match);
    // Returns change with each step. A button that is replaced while it is pressed gets no click.
    const text = JSON.stringify([{...match, countdown: 0}, seat], (key, value) => (key === "return" ? undefined : value));
    $("seats").querySelectorAll("output").forEach((output, at) => (output.textContent = number(match?.seats[at]?.return)));
    if (text !== this.#shown) {
      this.#shown = text;
      this.#showSeats();
      this.#showPanel();
    }
    for (const waiting of this.#begun.splice(0)) {
      if (match && match.state === "running" && match.round > waiting.after && this.#own?.playing) waiting.resolve(match.round);
      else this.#begun.push(waiting);
    }
  }

  // Resolves to the number of the next round that the person plays, when it runs.
  begins(after) {
    return new Promise((resolve) => this.#begun.push({after, resolve}));
  }

  // Cancel the waits for a round.
  left() {
    for (const waiting of this.#begun.splice(0)) waiting.resolve(null);
  }

  get #mayBeReady() {
    const own = this.#own;
    return Boolean(own) && !own.playing && this.#match.state !== "starting";
  }

  #pressed(event) {
    const typing = works(event, "BUTTON", "A");
    if (event.key !== "Enter" || event.repeat || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.#mayBeReady || this.#own.ready) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    this.#actions.ready(true);
  }

  // Announcements for screen readers.
  #tell(before, match) {
    const said = [];
    for (const seat of match.seats) {
      const old = before.seats.find((one) => one.seat === seat.seat);
      if (!old) continue;
      if (seat.taken_by && seat.taken_by !== old.taken_by) said.push(`${seat.taken_by} takes ${seat.seat}.`);
      else if (old.taken_by && !seat.taken_by) said.push(`${old.taken_by} leaves ${seat.seat}.`);
      else if (seat.ready && !old.ready) said.push(`${seat.taken_by} is ready.`);
    }
    if (match.state === "countdown" && before.state !== "countdown") said.push(`It begins in ${Math.ceil(match.countdown)} seconds.`);
    if (match.state === "running" && before.state !== "running") said.push(`Round ${match.round} has begun.`);
    if (match.result && JSON.stringify(match.result) !== JSON.stringify(before.result)) {
      const own = match.result.seats.find(({seat}) => this.#isMine(seat));
      said.push(`Round ${match.result.round} is over. ${this.#outcome()}.${own ? ` Your return is ${number(own.return)}.` : ""}`);
    }
    if (said.length) this.#actions.announce(said.join(" "));
  }

  // Seats

  #showSeats() {
    const {seats = [], state, result} = this.#match ?? {};
    $("seats").hidden = !this.#match;
    replaceKeepingFocus($("seats"), "seat", seats.map((seat) => {
      const item = element("li", seat.seat === this.#seat ? "mine" : "");
      item.classList.toggle("won", Boolean(result?.winners.includes(seat.seat)));
      const place = element("small", "", seat.seat);
      place.title = seat.seat;
      if (seat.seat === this.#seat) place.append(" ", element("span", "you", "you"));
      const who = element("b", seat.kind === "policy" ? "policy" : "", seat.name);
      who.title = seat.name;
      item.append(place, who);
      if (state === "running") item.append(element("output", "", number(seat.return)));
      item.append(this.#mark(seat));
      return item;
    }));
  }

  // The content below a name: whether the player is ready, or a button that takes the seat.
  #mark(seat) {
    const {state} = this.#match;
    if (!seat.taken_by && this.#seat === null) {
      const button = element("button", "", "Sit here");
      button.dataset.seat = seat.seat;
      button.setAttribute("aria-label", `Sit here: ${seat.seat}`);
      button.onclick = () => this.#actions.sit(seat.seat);
      return button;
    }
    if (!seat.taken_by) return element("span", "mark", "free");
    if (state === "running" && !seat.playing) return element("span", "mark", `${seat.taken_by} plays next`);
    if (seat.kind === "agent") return element("span", "mark ready", "program");
    if (state === "running" || state === "starting") return element("span", "mark ready", "plays");
    return seat.ready ? element("span", "mark ready", "✓ ready") : element("span", "mark", "not ready");
  }

  // The panel over the picture

  // True if the person had a seat in the round of the result: others may have it now.
  #isMine(seat) {
    return this.#played?.round === this.#match.result.round && this.#played.seat === seat;
  }

  #outcome() {
    const {winners, seats, error} = this.#match.result;
    if (error !== null) return "It was broken off";
    const won = seats.filter(({seat}) => winners.includes(seat));
    if (won.length) {
      const you = won.some(({seat}) => this.#isMine(seat));
      const others = won.filter(({seat}) => !this.#isMine(seat)).map((one) => called(one, seats));
      const few = others.length < 4 ? others : [`${others.length} ${you ? "others" : "players"}`];
      return `${list(you ? ["You", ...few] : few)} ${won.length > 1 || you ? "win" : "wins"}`;
    }
    return seats.length > 1 ? `All have ${number(seats[0].return)}` : `The return is ${number(seats[0]?.return)}`;
  }

  #showPanel() {
    const match = this.#match, own = this.#own, panel = $("match");
    const result = match?.state === "gathering" || match?.state === "countdown" ? match.result : null;
    const aside = match?.state === "running" && own && !own.playing;
    panel.hidden = !match || (match.state === "running" && !aside);
    const counting = match?.state === "countdown" || match?.state === "starting";
    panel.className = aside ? "aside" : `${counting ? "counting" : ""} ${match?.round ? "" : "blank"}`.trim();
    if (panel.hidden) return;
    $("match-over").textContent = result && match.state === "gathering" ? `Round ${result.round} is over` : "";
    $("match-returns").hidden = match.state !== "gathering" || !result?.seats.length;
    if (result) this.#showReturns(result);
    this.#showStandings(match.standings ?? []);
    const [title, hint] = this.#words(match, own, result, aside);
    $("match-title").textContent = title;
    $("match-hint").textContent = hint;
    $("ready").hidden = !this.#mayBeReady;
    $("ready").textContent = own?.ready ? "Not ready" : result ? "Rematch" : "Ready";
    $("ready").classList.toggle("primary", !own?.ready);
    if (own && result) panel.scrollIntoView({block: "nearest"}); // on a small screen, the list of seats may have moved it
    this.#count();
  }

  #words(match, own, result, aside) {
    const others = match.seats.filter(({seat}) => match.waits_for.includes(seat) && seat !== this.#seat).map((seat) => seat.taken_by);
    const waits = others.length ? `Waiting for ${list(others)}.` : "";
    const ready = match.seats.filter((seat) => seat.ready && seat.kind === "person").map((seat) => seat.taken_by);
    const urged = ready.length ? `${list(ready)} ${ready.length > 1 ? "wait" : "waits"} for you. ` : "";
    if (aside) return ["", own.ready ? "This round goes on. You play in the next one." : "This round goes on. Play in the next one?"];
    if (match.state === "starting") return ["Go", ""];
    if (match.state === "countdown") return ["", "Get ready"];
    if (result) return [this.#outcome(), result.error ?? (own && !own.ready ? `${urged}${press("for a rematch")}`.trim() : waits)];
    if (!own) return [match.seats.some((seat) => seat.taken_by) ? "A round is about to begin" : "Nobody is here yet", `${waits} Take a seat, or watch.`.trim()];
    if (own.ready) return ["You are ready", waits];
    const free = match.seats.some((seat) => !seat.taken_by) ? "Agents play the seats that stay free. " : "";
    return [`You are ${own.seat}`, `${urged || free}${press("when you are ready")}`.trim()];
  }

  #showReturns({seats, winners}) {
    const order = [...seats].sort((one, other) => (other.return ?? -Infinity) - (one.return ?? -Infinity));
    $("match-returns").replaceChildren(...order.map((one) => {
      const item = element("li", winners.includes(one.seat) ? "won" : "");
      const who = element("b", "", this.#isMine(one.seat) ? `${one.name} (you)` : one.name);
      item.append(who, " ", element("small", "", one.seat), element("output", "", number(one.return)));
      return item;
    }));
  }

  // The standings over all rounds, if there were several.
  #showStandings(standings) {
    $("match-standings").hidden = this.#match.state !== "gathering" || this.#match.round < 2 || !standings.length;
    $("match-standings-rows").replaceChildren(...standings.slice(0, 6).map(({name, rounds, wins, best}) => {
      const row = element("tr");
      row.append(Object.assign(element("th", "", name), {scope: "row"}), element("td", "", rounds), element("td", "", wins), element("td", "", number(best)));
      return row;
    }));
  }

  #count() {
    if (this.#match?.state !== "countdown") return;
    const left = Math.max(1, Math.ceil((this.#endsAt - performance.now()) / 1000));
    if ($("match-title").textContent !== String(left)) $("match-title").textContent = String(left);
  }
}
