// The menu button for tools that are seldom used, on a narrow bar. A wide bar shows these tools side by side.

import {$} from "./dom.js";
import {state} from "./state.js";

function show(open) {
  $("more").setAttribute("aria-expanded", String(open));
  $("tools").classList.toggle("open", open);
}

const isOpen = () => $("tools").classList.contains("open");

export function startBar() {
  $("more").onclick = () => show(!isOpen());
  $("tools").addEventListener("click", (event) => {
    if (!event.target.closest("button")) return;
    const hides = isOpen();
    show(false);
    if (document.querySelector("dialog[open]")) return; // it has the focus
    // After a click with a pointer, the button must not keep the focus: the next Space is for the world.
    if (state.playing && event.detail > 0) $("stage").focus({preventScroll: true});
    else if (hides) $("more").focus();
  });
  $("bar").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isOpen()) return;
    event.stopPropagation(); // Escape closes the menu, and must not also stop playing
    show(false);
    $("more").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (isOpen() && event.target instanceof Element && !event.target.closest("#tools, #more")) show(false);
  });
}
