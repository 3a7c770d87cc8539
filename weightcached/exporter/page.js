"use strict";
// Fetches this page again and puts its content into place. Nothing becomes markup here: the parser
// reads what the exporter escaped.
const PERIOD_MS = 5000;
let since = new Date();

async function again() {
  // Who marks a text wants to keep it.
  if (!document.hidden && getSelection().isCollapsed) {
    try {
      const answer = await fetch(location.pathname, {signal: AbortSignal.timeout(2 * PERIOD_MS)});
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.querySelector("main").replaceWith(page.querySelector("main"));
      document.title = page.title;
      since = new Date();
      lost.hidden = true;
    } catch {
      lost.textContent = `The exporter does not answer. This is as of ${since.toLocaleTimeString()}.`;
      lost.hidden = false;
    }
  }
  setTimeout(again, PERIOD_MS);
}

const lost = document.getElementById("lost");
setTimeout(again, PERIOD_MS);
